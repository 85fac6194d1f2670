"""The mode in which models are measured."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients while the context lasts, then restore every module's own mode."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
