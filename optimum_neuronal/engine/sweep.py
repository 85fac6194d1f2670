"""What may be asked of a model before it is pruned: dense activations, the errors of trial plans, what deviates where."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..decoder.projections import Block
from ..decoder.trial import trial_weights
from ..metrics.alignment import total_error
from ..metrics.output_errors import OUTPUT_METRICS
from ..metrics.statistics import Norms, SquaredNorms, activation
from ..sparsity.plan import SparsityPlan
from .calls import Call
from .capture import next_token_logits
from .runner import Engine, final_norms
from .unfinished import Hidden


@dataclass(frozen=True)
class Deviation:
    """Where a pruned model's activations deviate from the dense one's: what the row step needs to know.

    Args:
        error (`float`): the alignment error of the whole plan.
        places (`dict[str, Tensor]`):
            Name of a [`Place`] -> `a_D - a_S`, signed, float64 on the CPU, shape (features of the place,).
    """

    error: float
    places: dict[str, torch.Tensor]


class Sweep(Engine):
    """The engine with what top-ups ask of it. Its arguments are the [`Engine`]'s."""

    _last_stream: tuple[SparsityPlan, list[Norms], Hidden] | None = None

    def release(self) -> None:
        super().release()
        self._last_stream = None

    def dense_norms(self) -> list[Norms]:
        """Squared norms of the dense model's own inputs over the alignment sequences, block by block. Kept."""
        return self._dense_pass()[0]

    @property
    def can_abandon(self) -> bool:
        """Whether running one candidate before the others is worth its extra sweep over the weights."""
        return not self.loader.streams and self.processes.count == 1

    def alignment_errors(
        self,
        plans: Sequence[SparsityPlan],
        reference: str,
        scope: str,
        metric: str,
        label: str,
        bound: float = math.inf,
    ) -> list[float]:
        """Alignment error of every plan (paper, Eq. 3), all of them in one sweep.

        Args:
            plans (`Sequence[SparsityPlan]`): what to try; no plan is applied.
            reference (`str`):
                Where dense activations and saliency come from. `"sparse-stream"`: the dense block run on the plan's
                own hidden states. `"dense"`: the dense model's own stream.
            scope, metric (`str`): see [`alignment_error`].
            label (`str`): what the progress bar calls the sweep.
            bound (`float`):
                A plan is abandoned as soon as its error exceeds this: errors add up block by block and never shrink.

        Returns:
            `list[float]`: one error per plan, summed over all pruned projections. Lower is better; infinite for plans
            that were abandoned before the last block.
        """

        def measure(name: str) -> tuple[list[float], dict]:
            mine = self.processes.deal(plans)
            return self.processes.collect(self._errors(mine, reference, (scope, metric), label, bound, name)), {}

        return self.once(plans, (reference, scope, metric, label, bound), measure)[0]

    def _errors(
        self,
        plans: Sequence[SparsityPlan],
        reference: str,
        measured_on: tuple[str, str],
        label: str,
        bound: float,
        name: str,
    ) -> list[float]:
        kept: dict[str, torch.Tensor] = {}  # "plan.block" -> error

        def so_far(member: int) -> list[torch.Tensor]:
            return [kept[key] for block in range(len(self.decoder.blocks)) if (key := f"{member}.{block}") in kept]

        def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
            outputs: list[Hidden] = [[] for _ in plans]  # stays empty for those that were abandoned
            unread = self.output_projections(block) if block is self.decoder.blocks[-1] else ()
            for members in grouped(streams, shared=reference == "dense"):
                norms = self._reference(reference, index, block, streams[members[0]], calls)
                changes = self.changes(block, norms, [plans[member] for member in members])
                for member, change_of in zip(members, changes):
                    with trial_weights(block.pruned, change_of):
                        output, sparse = self.replay(block, streams[member], calls, skipped=unread)
                    kept[f"{member}.{index}"] = total_error(block.pruned, norms, sparse, *measured_on)
                    if bound == math.inf or self.total(so_far(member)) <= bound:
                        outputs[member] = output
            return outputs

        if not plans:
            return []
        self.run(self.alignment_inputs(), len(plans), visit, label, kept, name)
        blocks = len(self.decoder.blocks)
        errors = [self.total(so_far(member)) for member in range(len(plans))]
        finished = [f"{member}.{blocks - 1}" in kept for member in range(len(plans))]
        return [error if done else math.inf for error, done in zip(errors, finished)]

    def output_errors(
        self,
        plans: Sequence[SparsityPlan],
        metric: str,
        label: str | None,
        reference: "str | SparsityPlan" = "dense",
        sequences: int | None = None,
    ) -> list[float]:
        """Error of every plan's next-token distributions on the alignment sequences, all plans in one sweep.

        Plans that agree up to some block share the work up to there.

        Args:
            plans (`Sequence[SparsityPlan]`): what to try; no plan is applied.
            metric (`str`):
                A name in `OUTPUT_METRICS`: `"kl"`, from the dense model's distributions, or `"nll"`, of the text.
            label (`str`, *optional*): what the progress bar calls the sweep.
            reference (`str`):
                Where saliency comes from: `"dense"`, the dense model's stream, measured once; `"sparse-stream"`, every
                plan's own stream, at twice the cost; or a plan ([`SparsityPlan`]): that plan's stream, measured once.
                Where the saliency updates weights, candidates are pruned by their score alone if a plan is given.
            sequences (`int`, *optional*):
                How many of the alignment sequences, from the first, the outputs are compared on; all if not given. The
                dense model's stream, where saliency comes from it, is that of all of them.

        Returns:
            `list[float]`: nats per predicted token, one per plan. Lower is better.
        """

        def measure(name: str) -> tuple[list[float], dict]:
            mine = self.processes.deal(plans)
            return self.processes.collect(self._output_errors(mine, metric, label, reference, sequences, name)), {}

        if isinstance(reference, SparsityPlan):
            return self.once([reference, *plans], (metric, label, "of the first plan", sequences), measure)[0]
        return self.once(plans, (metric, label, reference, sequences), measure)[0]

    def row_saliency(self, plan: SparsityPlan, label: str | None) -> dict[str, torch.Tensor]:
        """Sum of the saliency of every row's weights, measured on a plan's own stream.

        Returns:
            `dict[str, Tensor]`: projection name -> float64 on the CPU, shape (out,).
        """

        def measure(name: str) -> tuple[None, dict[str, torch.Tensor]]:
            rows: dict[str, torch.Tensor] = {}
            norms = self._stream_norms(plan)
            for index in range(len(self.decoder.blocks)):
                with self.loader.loaded(index) as block:
                    activations = self.activations(block, norms[index])
                    for projection in block.pruned:
                        rows[projection.name] = self.score(projection, activations).double().sum(dim=1).cpu()
            return None, rows

        return self.processes.from_first(self.once([plan], ("row saliency", label), measure))[1]

    def _stream_norms(self, plan: SparsityPlan) -> list[Norms]:
        """What the dense blocks receive behind the plan's sparse blocks; of the last plan asked for, kept."""
        return self._stream(plan)[0]

    def _stream(self, plan: SparsityPlan) -> tuple[list[Norms], Hidden]:
        """The same, and the last block's output."""
        if self._last_stream is not None and self._last_stream[0] is plan:
            return self._last_stream[1:]
        per_block: list[Norms] = []

        def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
            per_block.append(self.inputs_of(block, streams[0], calls, SquaredNorms))
            (change_of,) = self.changes(block, per_block[-1], [plan], updates=False)
            with trial_weights(block.pruned, change_of):
                return [self.replay(block, streams[0], calls, record=None)[0]]

        (output,) = self.run(self.alignment_inputs(), 1, visit, None)
        self._last_stream = plan, per_block, output
        return per_block, output

    def _output_errors(
        self,
        plans: Sequence[SparsityPlan],
        metric: str,
        label: str | None,
        reference: str | SparsityPlan,
        sequences: int | None,
        name: str,
    ) -> list[float]:
        given = self._stream_norms(reference) if isinstance(reference, SparsityPlan) else None

        def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
            outputs: list[Hidden] = [[] for _ in plans]
            for members in grouped(streams, shared=reference != "sparse-stream"):
                norms = given[index] if given else self._reference(reference, index, block, streams[members[0]], calls)
                alike = _alike(block, plans, streams, members)
                changes = self.changes(block, norms, [plans[same[0]] for same in alike], updates=given is None)
                for same, change_of in zip(alike, changes):
                    with trial_weights(block.pruned, change_of):
                        output = self.replay(block, streams[same[0]], calls, record=None)[0]
                    for member in same:
                        outputs[member] = output
            return outputs

        if not plans:
            return []
        ids = self.ids[: self.num_alignment_samples]
        compared = ids[:sequences]
        # A capture costs no block; parts of what was captured for all sequences would have to cut masks apart.
        inputs = self.alignment_inputs() if len(compared) == len(ids) else self.capture(compared)
        if given and sequences is None and len(plans) == 1 and plans[0] is reference:
            streams = [self._stream(reference)[1]]  # its own stream: all that is asked for has run already
        else:
            streams = self.run(inputs, len(plans), visit, label, {}, name)
        statistic = self.saliency.statistic if given is None else SquaredNorms
        dense = self._dense_pass(statistic)[2] if metric == "kl" else None
        return self._compare_outputs(compared, dense, streams, OUTPUT_METRICS[metric])

    def _compare_outputs(self, ids: torch.Tensor, dense: Hidden | None, streams: list[Hidden], compare) -> list[float]:
        """Sequence by sequence, so that logits take little memory and no bit depends on the batches."""
        distinct = {id(stream): stream for stream in streams}
        totals: dict[int, list[torch.Tensor]] = {key: [] for key in distinct}
        for batch, own_ids in enumerate(ids.split(self.batch_size)):
            for row, sequence in enumerate(own_ids.split(1)):
                expected = None if dense is None else self._logits(sequence, dense[batch][row : row + 1])
                for key, stream in distinct.items():
                    logits = self._logits(sequence, stream[batch][row : row + 1])
                    totals[key].append(compare(expected, logits, sequence.to(logits.device)).double())
        tokens = ids.shape[0] * (ids.shape[1] - 1)
        errors = {key: torch.stack(parts).sum().item() / tokens for key, parts in totals.items()}
        if not all(map(math.isfinite, errors.values())):
            raise ValueError("The model's logits are not finite: they overflow in the model's dtype.")
        return [errors[id(stream)] for stream in streams]

    def _logits(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return next_token_logits(self.decoder, ids, hidden, self.wrap, self.device)

    def dense_scores(self, score: Callable[[Block, dict[str, torch.Tensor]], list[float]], label: str) -> list:
        """What a function tells of every dense block: one pass of the dense model over all calibration sequences.

        Args:
            score: a block, with its weights at hand, and the activations of its pruned projections -> numbers.
            label (`str`): what the progress bar calls the pass; it is recorded under that name.

        Returns:
            `list[list[float]]`: block by block.
        """

        def measure() -> tuple[list, dict]:
            scores: list[list[float]] = []

            def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
                output, norms = self.replay(block, streams[0], calls)
                scores.append(score(block, self.activations(block, self.joined(norms, SquaredNorms))))
                return [output]

            self.run(self.capture_all(SquaredNorms), 1, visit, label, release=True)
            return scores, {}

        name = f"scores-{label.lower().replace(' ', '-')}"
        return self.kept(name, lambda: self.recorded(name, measure)[0])

    def deviation(self, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str) -> Deviation:
        """Alignment error of one plan, and the deviation at every place that rows feed. Arguments as above.

        With `"sparse-stream"` a block's first input is the same in both runs. There the rows of the block before
        are compared by that block's two outputs, each as this block's first projection receives it.
        """

        def measure(name: str) -> tuple[float, dict[str, torch.Tensor]]:
            return self._deviation(plan, reference, (scope, metric), label, name)

        found = self.once([plan], (reference, scope, metric, label), measure)
        return Deviation(*self.processes.from_first(found))

    def _deviation(
        self, plan: SparsityPlan, reference: str, measured_on: tuple[str, str], label: str, name: str
    ) -> tuple[float, dict[str, torch.Tensor]]:
        kept: dict[str, torch.Tensor] = {}  # "error block" or "place name"

        def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
            hidden, dense_hidden = streams
            if reference == "dense":
                dense_output, norms = dense_hidden, self.dense_norms()[index]
            else:
                dense_output, norms = self.replay(block, hidden, calls, self.saliency.statistic)
            (change_of,) = self.changes(block, norms, [plan])
            with trial_weights(block.pruned, change_of):
                output, sparse = self.replay(block, hidden, calls)
            kept[f"error {index}"] = total_error(block.pruned, norms, sparse, *measured_on)
            if index > 0:
                before = norms
                if reference != "dense":  # only the first input is wanted, so no projection need be computed
                    before = self.replay(block, dense_hidden, calls, skipped=list(block.projections.values()))[1]
                entry = block.entry
                kept[f"place {self.decoder.blocks[index - 1].name}"] = _difference(before[entry], sparse[entry])
            for place, difference in self._deviations(block, norms, sparse).items():
                kept[f"place {place}"] = difference
            return [output, dense_output]

        inputs = self.alignment_inputs()
        output, dense_output = self.run(inputs, 2, visit, label, kept, name)
        dense_final = self._dense_pass()[1] if reference == "dense" else final_norms(inputs.final_norm, dense_output)
        last = _difference(dense_final, final_norms(inputs.final_norm, output))
        kept[f"place {self.decoder.blocks[-1].name}"] = last
        errors = [kept[f"error {index}"] for index in range(len(self.decoder.blocks))]
        places = {key.removeprefix("place "): value for key, value in kept.items() if key.startswith("place ")}
        return self.total(errors), {place: value.double().cpu() for place, value in places.items()}

    def _deviations(self, block: Block, dense: Norms, sparse: Norms) -> dict[str, torch.Tensor]:
        """Deviation of every place inside a block that rows of its pruned projections feed."""
        fed = {self.decoder.place_fed_by(block, projection) for projection in block.pruned} - {None}
        deviations = {}
        for place in sorted((place for place in fed if place.name != block.name), key=lambda place: place.name):
            name = place.name
            if name not in dense:  # left out by the user, and not understood: its rows are treated alike
                deviations[name] = torch.zeros(place.features)
                continue
            deviations[name] = _difference(dense[name], sparse[name])
            reader = block.projections.get(name)
            if reader is not None and reader.expert is not None:
                fewest = min(dense[name].tokens, sparse[name].tokens)
                deviations[name] *= fewest >= self.min_expert_tokens  # a few tokens' deviation says nothing
        return deviations

    def _dense_pass(self, statistic: type[SquaredNorms] | None = None) -> tuple[list[Norms], SquaredNorms, Hidden]:
        """Norms by block, those behind the final norm, and the last block's output. Kept."""
        statistic = statistic or self.saliency.statistic

        def measure() -> tuple[list[Norms], SquaredNorms, Hidden]:
            per_block: list[Norms] = []

            def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
                output, norms = self.replay(block, streams[0], calls, statistic)
                per_block.append(norms)
                return [output]

            inputs = self.alignment_inputs()
            (output,) = self.run(inputs, 1, visit, "Dense activations")
            return per_block, final_norms(inputs.final_norm, output), output

        return self.kept(("dense", statistic, self.batch_size), measure)

    def _reference(self, reference: str, index: int, block: Block, hidden: Hidden, calls: Sequence[Call]) -> Norms:
        """What the dense block's projections receive: in the dense model, or on these hidden states."""
        if reference == "dense":
            return self.dense_norms()[index]
        return self.inputs_of(block, hidden, calls)


def grouped(streams: list[Hidden], shared: bool) -> list[list[int]]:
    """Indices of streams that share the dense block's activations: those with the very same hidden states.

    Streams without any were abandoned.
    """
    groups: dict[int, list[int]] = {}
    for index, stream in enumerate(streams):
        if not stream:
            continue
        groups.setdefault(0 if shared else id(stream), []).append(index)
    return list(groups.values())


def _alike(block: Block, plans: Sequence[SparsityPlan], streams: list[Hidden], members: list[int]) -> list[list[int]]:
    """The members by what comes out of the block: those with the same hidden states and the same plan for it."""
    alike: dict[tuple, list[int]] = {}
    for member in members:
        plan = (torch.as_tensor(plans[member].sparsity[name], dtype=torch.float64) for name in block.pruned_names)
        key = (id(streams[member]), b"".join(value.numpy().tobytes() for value in plan))
        alike.setdefault(key, []).append(member)
    return list(alike.values())


def _difference(dense: SquaredNorms, sparse: SquaredNorms) -> torch.Tensor:
    return activation(dense.value) - activation(sparse.value)
