"""Refit: the kept weights of a block are fitted to the dense model by gradients (Guo et al., EBFT, 2024).

The saliency makes five sixths of a block's zeros. The refit adds the others while it fits the weights, where the block's
output suffers the least. Projections of equal sparsity share these zeros, so one may get more than another. With a pattern,
the saliency makes all zeros. Norms, biases and everything else stay as they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..blocks.block_inputs import Call, Stream
from ..blocks.runner import output_with
from ..blocks.statistics import Norms
from ..model.change import Change, NewWeight
from ..model.projections import Block, Projection, trial_tensors
from ..saliency.plan import Plan, differs_by_row, mask_rows, mask_whole, pruned_count


SEQUENCES_PER_STEP, TOKENS_PER_STEP = 8, 512  # at most, but at least one sequence
VALIDATION = 8  # one step in this many, at the end, is held out to choose the best epoch
LAST_RATE = 0.1  # of the learning rate, at the end
DAMPENING = 0.01  # of a column's energy: share of their mean
ADDED = 1 / 6  # share of the zeros that the refit adds
ROUNDS = 12  # in which it adds them, fewer each time, in the first half of its steps
MEASURED = 8  # batches on which it measures where the output suffers the least
NO_CURVATURE = 1e-18  # of projections that do not reach the output: above 0, so that magnitude still ranks them
LEAST_CURVATURE = 1e-6  # curvature of a row or a column, as a share of their mean
FLOAT16_SCALE = 2.0**16  # of the error, whose gradients would underflow
RUNS = 3  # of a block for each sequence of an epoch; a gradient counts as two


def first_zeros(plan: Plan, projections: Sequence[Projection]) -> Plan:
    """Return the sparsity that the saliency makes, before the refit adds the last zeros of a plan."""
    amounts = {}
    for projection in projections:
        amount = plan.sparsity[projection.name]
        if differs_by_row(amount):  # no row gets more than it has in the end
            counts = pruned_count(amount, projection.shape)
            amounts[projection.name] = ((1 - ADDED) * counts).floor().double() / projection.shape[1]
        else:
            amounts[projection.name] = (1 - ADDED) * amount
    return replace(plan, sparsity=amounts)


@dataclass(frozen=True)
class Refit:
    """A fit of a block's kept weights with Adam; its learning rate falls to a tenth along a cosine."""

    epochs: int
    learning_rate: float  # the first step, as a share of the root mean square of a matrix's kept weights
    dtype: torch.dtype = torch.float32  # of the matrix products, if the weights are float32
    importance: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see [`feature_importance`]; 1 by default

    @staticmethod
    def batch_size(tokens: int) -> int:
        """Return the number of sequences in a step. It is part of the method, and changes the result."""
        return max(1, min(SEQUENCES_PER_STEP, TOKENS_PER_STEP // tokens))

    def fit(
        self,
        block: Block,
        changes: Mapping[str, Change],
        norms: Norms,
        inputs: Stream,
        expected: Stream,
        calls: Sequence[Call],
        plan: Plan | None = None,
    ) -> dict[str, Change]:
        """Return the changes of a block's pruned projections after the best epoch, by name. The model's weights stay.

        `inputs` are the hidden states that the sparse block receives, and `expected` the output to approximate. `norms`
        are those of the projections' inputs. The zeros of `changes` stay. With a `plan`, more are added until there are as
        many as it asks for.
        """
        batches = list(zip(inputs, expected, calls))
        count = max(1, len(batches) // VALIDATION)
        steps, heldout = batches[:-count], batches[-count:]
        importance = self.importance.get(block.name, torch.ones(()))
        start = partial(_Weights, block, changes, norms, self.dtype, importance, plan)
        if plan is not None:
            start = partial(start, start().curvature(block, steps[:MEASURED]))
        weights = start()
        weights.prune()  # all at once, which an epoch has to beat
        least, best = _error(block, weights, heldout), weights.snapshot()
        weights = start()
        rates = [self.learning_rate * size for size in weights.sizes()]
        groups = [{"params": [master], "lr": rate} for master, rate in zip(weights.masters, rates)]
        optimizer = torch.optim.Adam(groups, fused=True)
        total, taken = self.epochs * len(steps), 0
        zeros = 1.0 if plan is None else zeros_due(0, total)
        schedule = LambdaLR(
            optimizer, lambda done: LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * (done / total))) / 2
        )
        for epoch in range(self.epochs):
            order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(epoch)).tolist()
            for place in order:
                weights.step(optimizer, block, steps[place])
                schedule.step()
                taken += 1
                if (due := zeros_due(taken, total)) > zeros:
                    zeros = due
                    weights.prune(zeros)
            if zeros < 1:
                continue
            error = _error(block, weights, heldout)
            if error < least:
                least, best = error, weights.snapshot()
        return {p.name: NewWeight(p.view(best[weights.places[p.owner]])) for p in block.pruned}


def zeros_due(taken: int, total: int) -> float:
    """Return the share of a plan's zeros that there should be after so many steps, 1 after half of them."""
    rounds = min(ROUNDS, 2 * ROUNDS * taken // total)
    return 1 - ADDED * (1 - rounds / ROUNDS) ** 3


Batch = tuple[torch.Tensor, torch.Tensor, Call]  # inputs, expected outputs, how the block is called


def column_steps(energy: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return how far a step moves each weight, relative to the learning rate: 0 where it is not kept.

    A step is inverse to the root mean square of its column's input, so that all columns change the output
    equally. The mean square over the kept weights is 1. `energy`: sums of squared inputs, shape (in,); `kept`: shape
    (out, in).
    """
    squares = 1 / (energy + DAMPENING * energy.mean()).clamp(min=1e-18)
    counts = kept.sum(dim=0)
    return (squares * counts.sum() / (squares * counts).sum()).sqrt().where(kept, 0)


class _Weights:
    """Float32 masters of the parameters that hold a block's pruned projections, and how far a step moves each weight."""

    def __init__(
        self,
        block: Block,
        changes: Mapping[str, Change],
        norms: Norms,
        dtype: torch.dtype,
        importance: torch.Tensor,
        plan: Plan | None,
        curvature: Mapping[str, torch.Tensor] | None = None,
    ):
        changed = trial_tensors(block.pruned, lambda p: changes[p.name])
        names = {parameter: name for name, parameter in block.module.named_parameters()}
        self._products, self._plan, self._curvature = dtype, plan, curvature
        self._dtypes = {names[owner]: owner.dtype for owner in changed}
        self._scale = FLOAT16_SCALE if torch.float16 in self._dtypes.values() else 1.0
        self.places = {owner: place for place, owner in enumerate(changed)}
        self.masters = [trial.float().clone().requires_grad_() for trial in changed.values()]
        self._importance = importance.to(self.masters[0].device)
        self._steps = [torch.zeros_like(master, requires_grad=False) for master in self.masters]
        self._projections, self._energies = block.pruned, {}
        for projection in block.pruned:
            weight, norm = self._weight(projection), norms.get(projection.name)
            alike = torch.ones_like(weight[0])  # of an expert that received nothing
            self._energies[projection.name] = alike if norm is None else norm.value.sum(dim=0).to(alike)
            self._keep(projection, weight != 0)

    def _weight(self, projection: Projection) -> torch.Tensor:
        """Return a view of a projection's master, (out, in)."""
        return projection.view(self.masters[self.places[projection.owner]].detach())

    def _keep(self, projection: Projection, kept: torch.Tensor) -> None:
        """Let steps change the kept weights alone. `kept` is (out, in)."""
        steps = projection.view(self._steps[self.places[projection.owner]])
        steps.copy_(column_steps(self._energies[projection.name], kept))

    def prune(self, share: float = 1.0) -> None:
        """Prune to a share of the plan's zeros, where the error grows the least."""
        for pool in _pools(self._projections, self._plan) if self._plan is not None else ():
            weights = [self._weight(projection) for projection in pool]
            scores = [weight.square() * self._curvature[p.name] for weight, p in zip(weights, pool)]
            counts = [pruned_count(self._plan.sparsity[projection.name], projection.shape) for projection in pool]
            if isinstance(counts[0], torch.Tensor):  # of rows, in a pool of one projection
                masks = [mask_rows(scores[0], (share * counts[0]).long())]
            else:
                kept = mask_whole(torch.cat([score.flatten() for score in scores]), int(share * sum(counts)))
                masks = kept.split([score.numel() for score in scores])
            for projection, weight, mask in zip(pool, weights, masks):
                kept = mask.view(weight.shape) & (weight != 0)
                weight.masked_fill_(~kept, 0)
                self._keep(projection, kept)

    def curvature(self, block: Block, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return how much the square of each weight adds to the error: the diagonal of its Gauss-Newton matrix, (out, in).

        Squared gradients of the output's sum with random signs estimate it (Hutchinson). The estimate is made smooth: each
        projection's is the product of its means over rows and over columns.
        """
        rows = {p.name: torch.zeros_like(self._weight(p)[:, 0]) for p in self._projections}
        columns = {p.name: torch.zeros_like(self._weight(p)[0]) for p in self._projections}
        for seed, (states, expected, call) in enumerate(batches):
            signs = torch.randint(0, 2, expected.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
            with torch.enable_grad():
                outputs = self.run(block, states, call)
                sizes = token_sizes(expected.to(outputs)).sqrt()
                scales = self._importance.sqrt() / sizes[..., None]
                signed = signs.to(outputs.device) * scales * outputs.float()
                gradients = torch.autograd.grad(signed.sum(), self.masters, materialize_grads=True)
            for p in self._projections:
                squares = p.view(gradients[self.places[p.owner]]).square()
                rows[p.name] += squares.mean(dim=1)
                columns[p.name] += squares.mean(dim=0)
        return {name: _product(rows[name], columns[name]) for name in rows}

    def run(self, block: Block, states: torch.Tensor, call: Call) -> torch.Tensor:
        weights = {name: master.to(dtype) for (name, dtype), master in zip(self._dtypes.items(), self.masters)}
        device, lower = self.masters[0].device.type, self._products is not torch.float32
        # Not the caller's autocast, and without its cache, which would keep the weights of the previous step.
        with torch.autocast(device, torch.bfloat16, enabled=lower, cache_enabled=False):
            return output_with(block, weights, states, call)

    def error(self, block: Block, batch: Batch) -> torch.Tensor:
        states, expected, call = batch
        return relative_error(self.run(block, states, call), expected, self._importance)

    def step(self, optimizer: torch.optim.Optimizer, block: Block, batch: Batch) -> None:
        """Take a step of the optimizer by the error of a batch. Only the masters get gradients."""
        optimizer.zero_grad()
        with torch.enable_grad():
            (self._scale * self.error(block, batch)).backward(inputs=self.masters)
        for master in self.masters:
            if master.grad is not None and self._scale != 1:
                master.grad /= self._scale
        before = [master.detach().clone() for master in self.masters]
        optimizer.step()
        with torch.no_grad():
            for master, old, steps in zip(self.masters, before, self._steps):
                master.copy_(old.lerp(master, steps))

    def sizes(self) -> list[float]:
        """Return the root mean square of each master's kept weights."""
        kept = [steps > 0 for steps in self._steps]
        return [
            float((m.detach().square() * k).sum() / k.sum().clamp(min=1)) ** 0.5 for m, k in zip(self.masters, kept)
        ]

    def snapshot(self) -> list[torch.Tensor]:
        """Return copies of the weights, in the model's dtype."""
        return [master.detach().to(dtype, copy=True) for master, dtype in zip(self.masters, self._dtypes.values())]


def _pools(projections: Sequence[Projection], plan: Plan) -> list[list[Projection]]:
    """Return the projections that share their zeros: all of equal sparsity, but each expert's alone."""
    pools: dict[str | float, list[Projection]] = {}
    for projection in projections:
        amount = plan.sparsity[projection.name]
        alone = differs_by_row(amount) or projection.expert is not None
        pools.setdefault(projection.name if alone else float(amount), []).append(projection)
    return list(pools.values())


def _product(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the matrix of these means, (out, in), above 0. It is constant if all are 0, as for an expert without tokens."""
    mean = rows.mean()
    if not 0 < mean < math.inf:
        return torch.full((len(rows), len(columns)), NO_CURVATURE, device=rows.device)
    return rows.clamp(min=LEAST_CURVATURE * mean)[:, None] * (columns / mean).clamp(min=LEAST_CURVATURE)


def _error(block: Block, weights: _Weights, batches: Sequence[Batch]) -> float:
    with torch.no_grad():
        return float(torch.stack([weights.error(block, batch) for batch in batches]).mean())


def relative_error(
    outputs: torch.Tensor, expected: torch.Tensor, importance: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return the squared error of each token relative to its squared size, averaged over tokens, since the next norm rescales each.

    Outputs of a few tokens, often the first, can be a thousand times larger and would hide the errors of all others.
    Both tensors have shape (batch, tokens, hidden size). `importance`, (hidden size,), multiplies the squared errors of
    features, but not the size.
    """
    expected = expected.to(outputs.device).float()
    return ((importance * (outputs.float() - expected).square()).sum(dim=-1) / token_sizes(expected)).mean()


def token_sizes(outputs: torch.Tensor) -> torch.Tensor:
    """Return each token's squared size, (batch, tokens), at least 1e-8 of their mean, so that no token's error is infinite."""
    sizes = outputs.float().square().sum(dim=-1)
    return sizes.maximum(1e-8 * sizes.mean()).clamp(min=1e-12)
