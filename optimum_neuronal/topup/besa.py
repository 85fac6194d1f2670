"""BESA: sparsity of every projection, learned by gradients of its block's reconstruction error."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..blocks.block_inputs import Call, Streams, to_device
from ..blocks.runner import BlockRunner, output_with
from ..common.validation import hyper
from ..files.records import Finding
from ..model.change import Zeros
from ..model.projections import Block, Projection, trial_tensors, trial_weights
from ..saliency.plan import Plan, row_counts
from ..trials import Measurement, PlanEvaluator
from .base import Allocation, TopUp, register_topup
from .distribution import bisect, shift_to_mean


LOSS_SCALE = 2.0**16  # small gradients would vanish in the weights' dtype; a power of two is exact


@register_topup("besa")
@dataclass(frozen=True)
class BESA(TopUp):
    """Blockwise parameter-efficient sparsity allocation (Xu et al., BESA, ICLR 2024), by projection.

    Block by block, every projection learns a distribution over candidate pruning rates. Its mean is the projection's
    sparsity. Its share above a weight's rank in the row is the probability that the weight is pruned, to which the mask's
    gradients pass straight through. The loss is [`reconstruction_loss`] plus `penalty * ((block's sparsity - s) / s)^2`.
    At the end, all sparsities are shifted by the same amount, so that the block meets its target s.

    Adam replaces the authors' Prodigy.

    Args:
        epochs (`int`): passes over the alignment sequences, with a step of the optimizer for each sequence.
        learning_rate (`float`): of Adam. 8 steps of 0.16 lead as far as the authors' 128 of 0.01.
        penalty (`float`): weight of the sparsity's deviation in the loss (5 in the authors' commands).
        candidate_step (`float`): distance between candidate pruning rates, which begin at 0 and are at most 1.
    """

    paper: ClassVar[str] = (
        "Xu et al., BESA: Pruning Large Language Models with Blockwise Parameter-Efficient Sparsity Allocation, ICLR 2024"
    )
    needs_fixed_weights: ClassVar[bool] = True  # it learns from kept weights that do not change

    epochs: int = hyper(1, 0)
    learning_rate: float = hyper(0.16, 0)
    penalty: float = hyper(5.0, 0)
    candidate_step: float = hyper(0.01, 1e-4, 0.5)

    def allocate(self, evaluator: PlanEvaluator, sparsity: float) -> Allocation:
        if sparsity == 0 or self.epochs == 0:  # nothing to learn
            return Allocation(Plan.uniform(evaluator.decoder.projections, sparsity))
        learned = evaluator.measure(LearnedSparsities(self, sparsity))
        return Allocation(Plan(learned["sparsity"]), {"besa": learned})


@dataclass(frozen=True)
class LearnedSparsities(Measurement):
    """Two sparsities of every projection: as learned, and after the shift to the target."""

    topup: BESA
    sparsity: float

    def measure(self, evaluator: PlanEvaluator, plans: Sequence[Plan]) -> Finding:
        runner, last, sparsity = evaluator.runner, evaluator.decoder.blocks[-1], self.sparsity
        sparsities: dict[str, dict[str, float]] = {"sparsity": {}, "learned": {}}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
            stream, dense_stream = streams
            target = runner.output(block, dense_stream, calls)
            if not block.pruned:
                return [runner.output(block, stream, calls), target]
            norms = runner.inputs_of(block, stream, calls, evaluator.saliency.statistic)
            inputs, rates = evaluator.inputs(block, norms), []
            for projection in block.pruned:
                score = evaluator.saliency.score_of(projection, inputs)
                rates.append(LearnedRate(projection, score, sparsity, self.topup.candidate_step))
            self._train(runner, block, rates, zip(stream, calls, target))
            learned = torch.tensor([rate.sparsity.item() for rate in rates], dtype=torch.float64)
            sizes = torch.tensor([projection.numel for projection in block.pruned])
            shifted = shift_to_mean(learned, sparsity, sizes, 0, 1).tolist()
            plan = Plan(dict(zip(block.pruned_names, shifted)))
            sparsities["learned"] |= zip(block.pruned_names, learned.tolist())
            sparsities["sparsity"] |= plan.sparsity
            if block is last:
                return [stream, target]
            (change_of,) = evaluator.changes(block, norms, [plan])
            with trial_weights(block.pruned, change_of):
                return [runner.output(block, stream, calls), target]

        # A step of the optimizer for every sequence, whatever the batch size.
        inputs = runner.capture(evaluator.alignment_ids, batch_size=1)
        runner.run(inputs, 2, visit, "learning sparsities by projection (BESA)")
        return sparsities, {}

    def _train(self, runner: BlockRunner, block: Block, rates: Sequence["LearnedRate"], data: Iterable) -> None:
        """Train a block's rates on every sequence in turn: its hidden states, call and target."""
        optimizer = torch.optim.Adam([rate.logits for rate in rates], lr=self.topup.learning_rate)
        total, data = sum(rate.weights for rate in rates), list(data)
        for hidden, call, target in data * self.topup.epochs:
            runner.block_forwards += len(hidden)
            gradients = _mask_gradients(block, rates, hidden, call, target)
            optimizer.zero_grad()
            with torch.enable_grad():
                share = sum(rate.sparsity.cpu() * (rate.weights / total) for rate in rates)
                loss = self.topup.penalty * ((share - self.sparsity) / self.sparsity) ** 2
                for rate, gradient in zip(rates, gradients):  # the chain rule from the masks on
                    loss = loss + (rate.kept * gradient).sum().cpu()
            loss.backward()
            optimizer.step()


class LearnedRate:
    """The learned pruning rate of a projection: a distribution over candidates, whose mean starts at `sparsity`."""

    def __init__(self, projection: Projection, score: torch.Tensor, sparsity: float, step: float):
        self.projection, self.weights = projection, projection.numel
        self._order = score.argsort(dim=1, stable=True).int()  # columns of every row, the least salient first
        device, in_features = score.device, projection.shape[1]
        rates = torch.arange(int(1 / step + 1e-6) + 1, dtype=torch.float64) * step
        self._rates = rates.float().to(device)
        # (candidates, in): 1 where a candidate prunes the weight of a rank in a row
        counts = (rates * in_features + 1e-4).floor()
        self._prunes = (torch.arange(in_features) < counts[:, None]).float().to(device)
        self.logits = tilted(rates, sparsity).float().to(device).requires_grad_()

    @property
    def sparsity(self) -> torch.Tensor:
        """Mean of the distribution, a scalar that gradients go through."""
        return self.logits.softmax(dim=0) @ self._rates

    @property
    def kept(self) -> torch.Tensor:
        """Probability that the weight of each rank is kept, shape (in,), that gradients go through."""
        return 1 - self.logits.softmax(dim=0) @ self._prunes

    def mask(self) -> torch.Tensor:
        """Return the mask at the present sparsity: boolean, shape (out, in), True where kept."""
        share = min(max(self.sparsity.item(), 0.0), 1.0)
        counts = row_counts(share, self.projection.shape)[:, None].to(self._order.device)
        ranks = torch.arange(self._order.shape[1], device=self._order.device)
        return torch.zeros_like(self._order, dtype=torch.bool).scatter_(1, self._order.long(), ranks >= counts)

    def by_rank(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum over the rows of each rank's gradients, (out, in) -> (in,)."""
        return gradient.gather(1, self._order.long()).sum(dim=0)


def _mask_gradients(
    block: Block, rates: Sequence[LearnedRate], hidden: torch.Tensor, call: Call, target: torch.Tensor
) -> list[torch.Tensor]:
    """Return each projection's gradient of a sequence's error with respect to the mask at each rank, shape (in,).

    A mask multiplies the weights, so its gradient is the sparse weight's times the dense weight.
    """
    by_name, weights = {rate.projection.name: rate for rate in rates}, dict(block.module.named_parameters())
    changed = trial_tensors(block.pruned, lambda projection: Zeros(by_name[projection.name].mask()))
    sparse = {name: changed[owner].requires_grad_() for name, owner in weights.items() if owner in changed}
    with torch.enable_grad():
        output = output_with(block, sparse, hidden, call)
        loss = reconstruction_loss(output, to_device(target, output.device)) * LOSS_SCALE
        sparse_gradients = torch.autograd.grad(loss, list(sparse.values()), allow_unused=True)
    by_owner = {weights[name]: gradient for name, gradient in zip(sparse, sparse_gradients)}
    gradients = []
    for rate in rates:
        projection, gradient = rate.projection, by_owner[rate.projection.owner]
        gradient = torch.zeros_like(projection.owner) if gradient is None else gradient  # no token reached the expert
        product = projection.view(gradient).float() * projection.weight.float()
        gradients.append(rate.by_rank(product) / LOSS_SCALE)
    return gradients


def reconstruction_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over features of `|| target - output ||^2 / || target ||^2`, norms over tokens (authors' code)."""
    output, target = output.flatten(0, -2).float(), target.flatten(0, -2).float()
    return ((target - output).square().sum(dim=0) / target.square().sum(dim=0).clamp(min=1e-12)).mean()


def tilted(rates: torch.Tensor, mean: float) -> torch.Tensor:
    """Return logits `k * rate` of the distribution with a given mean in (0, 1) that is closest to equal probabilities."""
    factor = bisect(lambda k: bool((rates * k).softmax(dim=0) @ rates < mean), -1e5, 1e5, 100)
    return rates * factor
