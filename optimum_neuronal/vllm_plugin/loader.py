"""The load format of vLLM: reads packed checkpoints packed, and dense ones by vLLM's default loader."""

import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ..checkpoint.hub import find_checkpoint
from ..checkpoint.names import QUANT_METHOD
from ..checkpoint.packed_files import is_packed, read_weights
from .arriving import PackedRows


@register_model_loader(QUANT_METHOD)
class PackedLoader(DefaultModelLoader):
    """vLLM's default loader, except that weights of packed checkpoints are checked and stay packed."""

    def __init__(self, load_config: LoadConfig):
        super().__init__(replace(load_config, load_format="auto"))
        self.enable_weights_track = True  # a parameter that was not loaded is an error, as in dense models

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and weights; packed ones are [`PackedRows`]. Raise `ValueError` if the checkpoint is damaged."""
        if not is_packed(vars(model_config.hf_config)):
            yield from super().get_all_weights(model_config, model)
            return
        self.counter_before_loading_weights = time.perf_counter()
        folder = find_checkpoint(model_config.model, model_config.revision, cache_dir=self.load_config.download_dir)
        for name, weight, header in read_weights(folder, packed=True):
            if header is not None:
                weight = weight.to_dense().mT if header.transposed else PackedRows(weight)
            yield name, weight
