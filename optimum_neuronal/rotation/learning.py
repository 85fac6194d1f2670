"""Learns the rotations of a model: Cayley transforms, found by Adam.

Projections count by their Fisher information: how much an error in a projection's output changes the model's loss. It takes
one backward pass over a few sequences, block by block with recomputation, with labels that the model itself draws.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..blocks.block_inputs import Call, Stream, Streams, first_output, to_device
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Hessian, wide_dtype
from ..common.validation import hyper
from ..model.projections import Block
from .merging import Rotations
from .objective import LOOK_EVERY, Term, block_loss, divide_rows, find_terms
from .rotated_weights import RotatedWeights


LABEL = "learning a rotation"
BACKWARD = 2  # block forwards that take as long as one with gradients
CUTS = (0.5, 0.9)  # least and largest default of `cut`: a threshold at the target sparsity works best
ENOUGH_ROWS = 1024  # drawn rows of a weight with as many rows as the model has features; fewer gave worse rotations


@dataclass(frozen=True)
class Rotation:
    """How a model is rotated before it is pruned.

    Args:
        steps (`int`): steps of Adam.
        learning_rate (`float`): of the first step; it decays to 0 along a cosine.
        cut (`float`, *optional*): share of the weights that the objective's threshold cuts, in (0, 1]. None: see `at`.
        fisher_samples (`int`): first calibration sequences, for the Fisher information.
        untie (`bool`): False leaves the residual stream alone if head and embeddings share their weights.
    """

    steps: int = hyper(150, 1)
    learning_rate: float = hyper(0.01, 0, above=True)
    cut: float | None = hyper(None, 0, 1, above=True)
    fisher_samples: int = hyper(16, 1)
    untie: bool = True

    def at(self, sparsity: float) -> "Rotation":
        """Return the rotation with a `cut` for a target sparsity, unless it has one."""
        least, most = CUTS
        return self if self.cut is not None else replace(self, cut=min(max(sparsity, least), most))

    def learn(
        self, rotated: RotatedWeights, runner: BlockRunner, ids: torch.Tensor, seed: int
    ) -> tuple[Rotations, list[float]]:
        """Return the rotations of a model with folded norms, and the objective before each step."""
        fisher = fisher_weights(runner, ids[: self.fisher_samples], seed)
        terms = self.find_terms(rotated, runner, ids, fisher)
        with torch.enable_grad():
            return self.descend(rotated, terms, runner, seed)

    @staticmethod
    def find_terms(
        rotated: RotatedWeights, runner: BlockRunner, ids: torch.Tensor, fisher: Mapping[str, float]
    ) -> list[list[Term]]:
        terms: list[list[Term]] = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            output, norms = runner.replay(block, streams[0], calls, Hessian)
            terms.append(find_terms(rotated.blocks[index], norms, fisher))
            return [output]

        runner.run(runner.capture(ids), 1, visit, LABEL, release=True)
        return terms

    def descend(
        self, rotated: RotatedWeights, terms: Sequence[Sequence[Term]], runner: BlockRunner, seed: int
    ) -> tuple[Rotations, list[float]]:
        first, unrotated = next((term for own in terms for term in own), None), Rotations.identity(rotated)
        if first is None:
            return unrotated, [0.0]
        device = first.inverse.device
        share = min(1.0, ENOUGH_ROWS / rotated.decoder.config.hidden_size)
        if share < 1:
            with torch.no_grad():
                divide_rows({term: term.measure(self.cut) for own in terms for term in own}, share)
        generator = torch.Generator().manual_seed(seed)

        def start(rotation: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(rotation, dtype=torch.float32, device=device, requires_grad=True)

        stream = start(unrotated.stream) if rotated.rotates_stream else None
        heads = [start(rotation) for rotation in unrotated.heads]
        optimizer = torch.optim.Adam(heads if stream is None else [stream, *heads], self.learning_rate)
        losses = []
        for step in runner.progress(range(self.steps), LABEL, "step"):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * (1 + math.cos(math.pi * step / self.steps)) / 2
            optimizer.zero_grad()
            rotation = None if stream is None else cayley(stream)
            leaf = None if rotation is None else rotation.detach().requires_grad_()
            found = []
            for own, turned in zip(terms, heads):  # gradients flow block by block, to save memory
                if own:
                    drawn_by = None if step % LOOK_EVERY else generator
                    loss = block_loss(own, leaf, cayley(turned), self.cut, drawn_by)
                    loss.backward()
                    found.append(loss.detach())
            if rotation is not None:
                rotation.backward(leaf.grad)
            optimizer.step()
            losses.append(sum(map(float, found)))
        with torch.no_grad():
            turned = [None if own is None else cayley(own.to(wide_dtype(device))).cpu() for own in (stream, *heads)]
            return Rotations(turned[0], turned[1:]), losses


def cayley(generator: torch.Tensor) -> torch.Tensor:
    """Return the rotation `R = (I - A)^-1 (I + A)` of the skew-symmetric `A = P - P^T`, for P of shape (..., n, n)."""
    skew = generator - generator.mT
    identity = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(identity - skew, identity + skew)


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

    with ExitStack() as stack:
        for name, module in watched.items():
            stack.enter_context(module.register_forward_hook(partial(keep, name)))
        yield outputs
