"""Fisher information: how much an error in a projection's output changes the model's loss.

One backward pass over a few sequences, block by block with recomputation, with labels that the model itself draws.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..blocks.block_inputs import Call, Stream, Streams, first_output, to_device
from ..blocks.runner import BlockRunner
from ..model.projections import Block


LABEL = "Rotation"  # of the progress bar
BACKWARD = 2  # block forwards that take as long as one with gradients


def fisher_weights(runner: BlockRunner, ids: torch.Tensor, seed: int) -> dict[str, float]:
    """Return projection name -> Fisher information of its output y times the mean square of y, scaled to a mean of 1.

    This is `sum over tokens of |g|^2 * mean of y^2`, g being the gradient of the negative log-likelihood of labels, drawn
    by `seed`, at y. All experts of an MoE layer share its value equally.
    """
    inputs, entering = runner.capture(ids), []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        entering.append(streams[0])
        return runner.pass_on(index, block, calls, streams)

    (last,) = runner.run(inputs, 1, visit, LABEL, release=True)
    gradients, found, blocks = _loss_gradients(runner, ids, last, seed), {}, runner.decoder.blocks
    for index in runner.progress(range(len(blocks))[::-1], LABEL):
        runner.block_forwards += BACKWARD * len(ids)
        gradients = _through(blocks[index], entering.pop(), inputs.calls[index], gradients, found)
    mean = sum(found.values()) / len(found) or 1.0
    return {name: value / mean for name, value in found.items()}


def _loss_gradients(runner: BlockRunner, ids: torch.Tensor, last: Stream, seed: int) -> list[torch.Tensor]:
    """Return the gradient of the loss at the last block's output, one tensor per batch."""
    generator, gradients = torch.Generator().manual_seed(seed), []
    for batch, hidden in zip(ids.split([len(states) for states in last]), last):
        drawn, found = torch.rand(batch.shape, generator=generator), []
        for own, states, share in zip(batch.split(1), hidden.split(1), drawn.split(1)):  # logits take much memory
            states = states.detach().requires_grad_()
            with torch.enable_grad():
                logits = runner.logits(own, states)
                shares = logits.detach().softmax(-1).cumsum(-1)
                labels = torch.searchsorted(shares, share.to(shares.device)[..., None]).clamp(max=logits.shape[-1] - 1)
                loss = -logits.log_softmax(-1).gather(-1, labels).sum()
                found.append(torch.autograd.grad(loss, states)[0])
        gradients.append(torch.cat(found))
    return gradients


def _through(
    block: Block, entering: Stream, calls: Sequence[Call], gradients: Sequence[torch.Tensor], found: dict[str, float]
) -> list[torch.Tensor]:
    """Add the block's Fisher information to `found`, and return the gradients at its inputs."""
    sums: dict[str, list[float]] = {}
    device, before = next(block.module.parameters()).device, []
    for states, call, gradient in zip(entering, calls, gradients):
        states = to_device(states, device).detach().requires_grad_()
        with torch.enable_grad(), _outputs(block) as outputs:
            output = first_output(block.module(states, *call.args, **call.kwargs))
            gradient = gradient.to(output.device, output.dtype)
            own, *others = torch.autograd.grad(output, [states, *outputs.values()], gradient)
        before.append(own)
        for (name, written), at_output in zip(outputs.items(), others):
            squares = float(at_output.float().square().sum()), float(written.detach().float().square().sum())
            sums[name] = [a + b for a, b in zip(sums.get(name, (0.0, 0.0, 0)), (*squares, written.numel()))]
    for projection in block.pruned:
        name = projection.name if projection.expert is None else projection.parent.rpartition(".")[0]
        squared, written, count = sums[name]
        found[projection.name] = squared * written / count / sum(p.module is projection.module for p in block.pruned)
    return before


@contextmanager
def _outputs(block: Block) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the outputs of a block's pruned projections and MoE layers, by name."""
    outputs: dict[str, torch.Tensor] = {}
    watched: dict[str, nn.Module] = {p.name: p.module for p in block.pruned if p.expert is None}
    watched |= {experts.name: experts.module for experts in block.experts}

    def keep(name: str, _module: nn.Module, _inputs: tuple, output: Any) -> None:
        outputs[name] = first_output(output)

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in watched.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
