"""Projections of trained models with the Hessians of their inputs, for tests of what random weights do not show."""

from functools import lru_cache

import authors
import torch

from optimum_neuronal.blocks.block_inputs import Stream
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.blocks.statistics import Hessian
from optimum_neuronal.common.torch_state import inference
from optimum_neuronal.demo.run import TINY_MODEL, load_tiny_model
from optimum_neuronal.model.find_blocks import find_decoder


Layer = tuple[torch.Tensor, torch.Tensor]  # a weight, (out, in), and the Hessian of its inputs, (in, in)


@lru_cache
def reference_layers() -> dict[str, Layer]:
    """By name inside the block: a middle block of the reference model."""
    return layers(authors.load_model(), authors.load_ids("calibration_ids")[:16], 3)


@lru_cache
def demo_layers() -> dict[str, Layer]:
    """The same of the demonstration's model."""
    model, tokenizer = load_tiny_model()
    text = (TINY_MODEL / "calibration.txt").read_text(encoding="utf-8")[:20_000]
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return layers(model, ids[: 16 * 256].view(16, 256), 3)


def layers(model, ids: torch.Tensor, index: int) -> dict[str, Layer]:
    """The projections of the block of an index, with what they receive in the dense model."""
    with inference(model):
        decoder = find_decoder(model)
        runner = BlockRunner(decoder, 4)
        inputs = runner.capture(ids)
        stream = Stream(inputs.hidden)
        for block, calls in zip(decoder.blocks[: index + 1], inputs.calls):
            stream, norms = runner.replay(block, stream, calls, Hessian)
    return {p.name.removeprefix(f"{block.name}."): (p.weight.clone(), norms[p.name].hessian) for p in block.pruned}


def loss(weight: torch.Tensor, sparse: torch.Tensor, hessian: torch.Tensor) -> float:
    """`||(W - V) X||^2 / ||W X||^2`, in float64."""
    weight, missing, hessian = weight.double(), (weight - sparse).double(), hessian.double()
    return float(((missing @ hessian) * missing).sum() / ((weight @ hessian) * weight).sum())
