"""Importance of the features of a block's output: what the norms that read the residual stream make of an error in each."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from ..blocks.block_inputs import Call, Stream, Streams, keep_shared, to_device
from ..blocks.runner import BlockRunner, output_with
from ..model.projections import Block


SAME = 1e-2  # relative difference of outputs that count as equal


def feature_importance(runner: BlockRunner, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the importance of the features of each block's output, float32 of mean 1, (hidden size,), by block name.

    Each later norm multiplies an error by its gains, and divides it by the size of the stream where it reads. The
    importance is the mean over these norms of the squared gains, scaled to mean 1 and divided by the median of the tokens'
    squared sizes in the dense model. A block without such a norm counts as one of equal gains.

    Only the first sequence of `ids`, shape (sequences, tokens), runs: others change the medians little.
    """
    inputs, blocks = runner.capture(ids[:1], 1), runner.decoder.blocks
    runner.block_forwards += len(blocks)
    parts = torch.zeros(len(blocks) + 1, inputs.hidden[0].shape[-1], dtype=torch.float64)  # the last of the final norm

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        (states,), (call,) = streams[0], calls
        parameters = {name: nn.Parameter(own.detach(), False) for name, own in block.module.named_parameters()}
        with ExitStack() as stack, torch.enable_grad():  # a gradient marks the stream
            for module in block.module.modules():
                if not any(module.children()):
                    stack.enter_context(module.register_forward_hook(partial(_observe, parts[index])))
            output = output_with(block, parameters, states.requires_grad_(), call).detach()
        if not parts[index].any():
            parts[index] += 1 / median_size(states)
        keep_shared(output, states, call)
        return [Stream([output])]

    ((end,),) = runner.run(inputs, 1, visit)
    if inputs.final_norm is not None:
        end = to_device(end, runner.device).requires_grad_()
        _observe(parts[-1], inputs.final_norm, (end,), end)
    later = parts.flip(0).cumsum(dim=0).flip(0)[1:]
    means = later.mean(dim=1, keepdim=True)
    return dict(zip((block.name for block in blocks), torch.where(means > 0, later / means, 1).float()))


def median_size(states: torch.Tensor) -> float:
    """Return the median of the tokens' squared sizes."""
    return float(states.detach().float().square().sum(dim=-1).median().clamp(min=1e-12))


def _observe(total: torch.Tensor, module: nn.Module, args: tuple, output: Any) -> torch.Tensor | None:
    """Add a norm's part to the total if it reads the stream. Detach what a norm, or a module with weights, makes of it."""
    states = args[0] if args else None
    if not (isinstance(states, torch.Tensor) and states.requires_grad and isinstance(output, torch.Tensor)):
        return None
    gains = squared_gains(module, states.detach(), *args[1:]) if states.shape[-1] == len(total) else None
    if gains is not None:
        total += gains.cpu().double() / float(gains.mean()) / median_size(states)
    passes_on = gains is None and next(module.parameters(), None) is None  # as dropout does
    return None if passes_on else output.detach()


@torch.no_grad()
def squared_gains(module: nn.Module, states: torch.Tensor, *args: Any) -> torch.Tensor | None:
    """Return the squared factors by which a norm multiplies the features of its input; None for another module.

    A norm is a module whose output stays the same if its input doubles. Inputs of 1 and -1 in turn show its gains apart from
    its bias.
    """
    signs = torch.ones_like(states)
    signs[..., 1::2] = -1
    plus, minus, twice = (module.forward(factor * signs, *args) for factor in (1, -1, 2))
    if plus.shape != states.shape or not (plus - twice).abs().max() <= SAME * plus.abs().max():
        return None
    gains = ((plus.float() - minus.float()) / 2).square().flatten(0, -2).mean(dim=0)
    return gains if gains.any() else None
