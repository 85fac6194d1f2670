"""Learns the rotations of a model: Cayley transforms, found by Adam."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..blocks.block_inputs import Call, Streams
from ..blocks.runner import BlockRunner
from ..blocks.statistics import Hessian, wide_dtype
from ..common.validation import hyper
from ..model.projections import Block
from .merging import Rotations
from .objective import LOOK_EVERY, Term, block_loss, divide_rows, find_terms
from .rotated_weights import RotatedWeights
from .sensitivity import LABEL, fisher_weights


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
