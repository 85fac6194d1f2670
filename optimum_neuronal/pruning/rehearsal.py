"""The rehearsal of a prune: its steps as the top-up asks for them, each kind measured once on a sample of the blocks."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..engine.capture import inference
from ..files.records import Finding
from ..model.projections import Block, Decoder
from ..sparsity.plan import SparsityPlan
from ..trials.alignment import Deviation
from ..trials.applier import PlanApplier
from ..trials.engine import Cache, Engine
from ..trials.levels import Levels, heldout_sequences
from ..trials.sweep import Score, Sweep
from . import sample_blocks
from .context import PruneContext
from .final_pass import FinalPruning
from .prune import allocate, make_engine
from .quantising import round_changes
from .refit import Refit
from .sample_blocks import FORWARDS, HIDDEN, KEPT, MIDDLE, MOMENT, OTHER, OUTSIDE, RUNS, MeasuredRunner, Work


FEW, MANY = 2, 6  # plans that a question is measured with; the difference tells what each further one takes
FIT_BATCHES = 4  # of the sample, if there is a refit, which learns from all but the last


@dataclass(frozen=True)
class Step:
    """Work of a prune with one label.

    Args:
        label (`str`): of the progress bar.
        plans (`int`): sparsity plans that it tries; 0 if it runs the dense model alone.
        block_forwards (`int`): how often it runs a block on one sequence.
        seconds (`float`): of all of it.
        moment_bytes, hidden_bytes, kept_bytes (`int`):
            Memory at most: what exists for a moment, hidden states, and what it leaves behind.
    """

    label: str
    plans: int
    block_forwards: int
    seconds: float
    moment_bytes: int
    hidden_bytes: int
    kept_bytes: int

    def __add__(self, other: "Step") -> "Step":
        """Return both one after the other, under this label."""
        return Step(
            self.label,
            self.plans + other.plans,
            self.block_forwards + other.block_forwards,
            self.seconds + other.seconds,
            max(self.moment_bytes, other.moment_bytes),
            max(self.hidden_bytes, other.hidden_bytes),
            max(self.kept_bytes, other.kept_bytes),
        )


@dataclass(frozen=True)
class Scale:
    """The size of a model and its calibration data, in those of the sample.

    Args:
        blocks (`int`): blocks of the model.
        middle (`float`): weights of all blocks but the first and the last, in the sample's block in the middle.
        narrower (`float`): width of the model in that of the sample.
        tokens (`float`): tokens of a sequence in that of the sample.
        samples, alignment (`int`): sequences for the prune, those for trials among them.
    """

    blocks: int
    middle: float
    narrower: float
    tokens: float
    samples: int
    alignment: int

    def step(
        self, label: str, plans: int, inside: Work, outside: Work, sequences: float, times: int, cubed: bool
    ) -> Step:
        """Return a step of the model.

        Args:
            label (`str`), plans (`int`): of the step.
            inside, outside ([`Work`]): inside and outside of blocks, on the sample.
            sequences (`float`): the model's sequences, in the sample's.
            times (`int`): how often what does not depend on the sequences is done.
            cubed (`bool`): True if that grows with the cube of a block's width.
        """
        more, spent = sequences * self.tokens, np.array(inside.spent)
        spent[OUTSIDE] = outside.spent[OUTSIDE]
        edges = min(self.blocks, 2)
        spent[MIDDLE] *= [self.middle, self.middle, self.blocks - edges]
        spent[OUTSIDE] *= more * self.narrower
        spent[:OUTSIDE] *= [
            more * self.narrower**2,
            times * self.narrower ** (3 if cubed else 2),
            sequences,
        ]
        moment = max(inside.memory[MOMENT], outside.memory[MOMENT]) * self.narrower**2
        return Step(
            label,
            plans,
            round(spent[:, FORWARDS].sum()),
            float(spent[:, [RUNS, OTHER]].sum()),
            int(moment),
            int(inside.memory[HIDDEN] * more * self.narrower),
            int(inside.memory[KEPT] * times * self.narrower**2 * (self.middle + edges)),
        )


class Rehearsal(Sweep):
    """A stand-in for [`Sweep`] that answers a top-up's questions at random, and notes what they take.

    Args:
        context ([`PruneContext`]): of the prune, its model on the meta device.
        scale ([`Scale`]): from the sample to the model.
        engine ([`Engine`]): of the sample, with a [`MeasuredRunner`] and sequences of its own.

    Attributes:
        steps (`list[Step]`): of the model, in their order. With `with_value_bits`, rehearsals share it.
    """

    def __init__(self, context: PruneContext, scale: Scale, engine: Engine):
        super().__init__(engine)
        self._context, self._scale = context, scale
        self.steps: list[Step] = []
        self._measured: dict[tuple, tuple[Any, Work]] = {}
        self._random = random.Random(0)
        self._base = self._plans(1)[0]  # of the sample, wherever a plan is a reference
        self._reference: SparsityPlan | None = None  # of the model, as last asked for

    @property
    def decoder(self) -> Decoder:
        return self._context.decoder

    def with_value_bits(self, bits: int | None) -> "Rehearsal":
        other = Rehearsal(self._context, self._scale, self.engine.with_value_bits(bits))
        other.steps, other._measured = self.steps, self._measured
        return other

    def solve(self, solvers: Mapping[float, PlanApplier], name: str, label: str) -> Levels:
        sparsity, applier = list(solvers.items())[len(solvers) // 2]
        scale, ids, aligned = self._scale, self.engine.ids, self.engine.num_alignment_samples
        own = len(ids) - heldout_sequences(len(ids), aligned)
        sequences = (scale.samples - heldout_sequences(scale.samples, scale.alignment)) / own
        asked = self._ask(
            ("solve", applier.value_bits),
            label,
            lambda _: self.engine.solve({sparsity: applier}, name, label),
            sequences=sequences,
            times=len(solvers),
        )
        # Trials read the two nearest of several levels: the one that was solved serves as both.
        blocks = [
            tensors | {key.replace("@0", "@1"): value for key, value in tensors.items()} for tensors in asked.blocks
        ]
        return replace(asked, sparsities=(sparsity / 2, (1 + sparsity) / 2), blocks=blocks)

    def dense_scores(self, score: Score, label: str) -> list[list[float]]:
        found = self._ask(
            ("dense scores", label), label, lambda _: super(Rehearsal, self).dense_scores(score, label), **self._all()
        )
        return self._of_all_blocks(found)

    def weight_scores(self, score: Callable[[Block], list], label: str) -> list[list]:
        return self._of_all_blocks(
            self._ask(("weights", label), label, lambda _: super(Rehearsal, self).weight_scores(score, label))
        )

    def own_runs(self, question: tuple, run: Callable[[Engine], Finding]) -> Any:
        return self._ask(question[:1], str(question[0][0]), lambda _: run(self.engine))[0]

    def alignment_errors(self, plans, reference, scope, metric, label, bound=float("inf")) -> list[float]:
        self._ask(
            ("alignment", reference, scope, metric),
            label,
            lambda own: super(Rehearsal, self).alignment_errors(own, reference, scope, metric, label),
            plans,
        )
        return self._errors(plans)

    def reconstruction_errors(self, plans, reference, label) -> list[float]:
        self._ask(
            ("reconstruction", reference),
            label,
            lambda own: super(Rehearsal, self).reconstruction_errors(own, reference, label),
            plans,
        )
        return self._errors(plans)

    def output_errors(self, plans, metric, label, reference="dense", sequences=None) -> list[float]:
        own_reference, kind = reference, reference
        if isinstance(reference, SparsityPlan):
            self._run_stream(reference, label)
            own_reference, kind = self._base, "itself" if plans[0] is reference else "a plan"
        elif isinstance(reference, Levels):
            kind = "levels"
        few = sequences and min(sequences, self.engine.num_alignment_samples)
        asked = min(sequences or self._scale.alignment, self._scale.alignment)
        self._ask(
            ("outputs", metric, kind, few),
            label,
            lambda own: super(Rehearsal, self).output_errors(
                [self._base] if kind == "itself" else own, metric, label, own_reference, few
            ),
            plans,
            _shared(self.decoder, plans),
            asked / (few or self.engine.num_alignment_samples),
        )
        return self._errors(plans)

    def deviation(self, plan, reference, scope, metric, label) -> Deviation:
        self._ask(
            ("deviation", reference),
            label,
            lambda own: super(Rehearsal, self).deviation(own[0], reference, scope, metric, label),
            [plan],
        )
        decoder = self.decoder
        places = {decoder.place_fed_by(block, p) for block in decoder.blocks for p in block.pruned} - {None}
        return Deviation(self._random.random(), {place.name: self._values(place.features) for place in places})

    def row_saliency(self, plan, label) -> dict[str, torch.Tensor]:
        self._run_stream(plan, label)
        self._ask(("rows",), label, lambda _: super(Rehearsal, self).row_saliency(self._base, label))
        return {name: self._values(projection.shape[0]) for name, projection in self.decoder.projections.items()}

    def check(self) -> None:
        """Note the check of the replay, of one sequence."""
        engine = self.engine

        def run(_) -> None:
            inputs = engine.runner.capture(engine.ids[:1])
            engine.runner.run(
                inputs, 1, lambda i, block, calls, s: [engine.runner.output(block, s[0], calls)], "Check"
            )

        self._ask(("check",), "Check", run, sequences=1)

    def final_pass(self, plan: SparsityPlan, bits: int | None, refit: Refit | None) -> None:
        """Note the final pass."""
        methods, engine = self._context.methods, self.engine.with_value_bits(bits)
        (own,) = self._plans(1, plan)
        final = FinalPruning.by(methods, engine, own, refit)
        changes, _ = self._ask(("final",), "Pruning", lambda _: final.find(), **self._all())
        if bits is not None and not methods.saliency.updates_weights:

            def round_all(_) -> None:
                for _, block in engine.runner.blocks():
                    round_changes(replace(engine.decoder, blocks=[block]), changes, bits)

            self._ask(("rounding",), "Rounding", round_all)

    def _all(self) -> dict[str, float]:
        return {"sequences": self._scale.samples / len(self.engine.ids)}

    def _run_stream(self, plan: SparsityPlan, label: str | None) -> None:
        """Note the run of a plan's own stream, unless it was the last."""
        if plan is not self._reference:
            self._ask(("stream",), label, lambda _: self.engine.stream_of(self._base))
            self._reference = plan

    def _ask(
        self,
        question: tuple,
        label: str | None,
        ask: Callable[[list[SparsityPlan]], Any],
        plans: Sequence[SparsityPlan] = (),
        shared: float | None = None,
        sequences: float | None = None,
        times: int = 1,
    ) -> Any:
        """Note a question to the model, and return the answer of the sample, which is asked once.

        Args:
            question (`tuple`): all that the work depends on, but for the number of plans.
            label (`str`, *optional*): of the step.
            ask: plans of the sample -> its answer.
            plans (`Sequence[SparsityPlan]`): of the model.
            shared (`float`, *optional*): how many of them a block runs on average. None: all.
            sequences (`float`, *optional*): the model's sequences, in the sample's. None: alignment sequences.
            times (`int`): as for [`Scale.step`].
        """
        label, count = label or "Top-up", len(plans)
        key = (*question, self.engine.applier.value_bits)
        counts = sorted({min(count, FEW), min(count, MANY)})
        for own in counts:
            if (key, own) not in self._measured:
                like = plans[0] if plans else None
                answer, works = self.engine.runner.measure(
                    label, lambda own=own, like=like: ask(self._plans(own, like))
                )
                self._measured[key, own] = answer, works.pop(label)
                self.steps += [self._step(name, 0, work, work) for name, work in works.items()]
        found = [self._measured[key, own][1] for own in counts]
        slope = (counts[-1] - counts[0]) or 1
        at = [
            found[0].toward(found[-1], (n - counts[0]) / slope) for n in (count if shared is None else shared, count)
        ]
        self.steps.append(self._step(label, count, *at, sequences, times))
        return self._measured[key, counts[-1]][0]

    def _step(
        self, label: str, plans: int, inside: Work, outside: Work, sequences: float | None = None, times: int = 1
    ) -> Step:
        if sequences is None:
            sequences = self._scale.alignment / self.engine.num_alignment_samples
        return self._scale.step(label, plans, inside, outside, sequences, times, self.saliency.updates_weights)

    def _plans(self, count: int, like: SparsityPlan | None = None) -> list[SparsityPlan]:
        """Return plans of the sample near the target, that share no block."""
        target, projections = self._context.config.sparsity or 0.5, self.engine.decoder.projections
        by_row = like is not None and any(getattr(value, "ndim", 0) for value in like.sparsity.values())
        found = []
        for index in range(count):
            sparsity = target * (1 - 0.01 * index)
            rows = {name: torch.full((p.shape[0],), sparsity, dtype=torch.float64) for name, p in projections.items()}
            found.append(SparsityPlan(rows if by_row else dict.fromkeys(projections, sparsity)))
        return found

    def _errors(self, plans: Sequence[SparsityPlan]) -> list[float]:
        return [1 + self._random.random() for _ in plans]

    def _values(self, count: int) -> torch.Tensor:
        return torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)

    def _of_all_blocks(self, found: list[list]) -> list[list]:
        """Return numbers for the model's blocks that are near to those of the sample's first pruned one."""
        first = next(values for values in found if values)
        return [
            [value and value * (1 + 0.1 * self._random.random()) for value in first] if block.pruned else []
            for block in self.decoder.blocks
        ]


def _shared(decoder: Decoder, plans: Sequence[SparsityPlan]) -> float:
    """Return how many of the plans a block runs on average: plans that are equal up to a block share it."""
    paths, runs = [0] * len(plans), 0
    for block in decoder.blocks:
        known: dict[tuple, int] = {}
        for index, plan in enumerate(plans):
            values = [torch.as_tensor(plan.sparsity[name], dtype=torch.float64) for name in block.pruned_names]
            key = (paths[index], *(value.numpy().tobytes() for value in values))
            paths[index] = known.setdefault(key, len(known))
        runs += len(known)
    return runs / len(decoder.blocks)


@dataclass(frozen=True)
class FirstEpoch(Refit):
    """A refit that runs one epoch and takes the others for as long.

    Args:
        runner ([`MeasuredRunner`], *optional*): notes them.
    """

    runner: MeasuredRunner | None = None

    def fit(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        start = sample_blocks.clock()
        fitted = Refit(1, self.learning_rate).fit(*args, **kwargs)
        self.runner.add((self.epochs - 1) * (sample_blocks.clock() - start))
        return fitted


def rehearse(context: PruneContext, tokens: int, batch_size: int, device: torch.device) -> list[Step]:
    """Return the steps of a prune in their order, those with one label together.

    Args:
        context ([`PruneContext`]): of the prune, its model on the meta device.
        tokens (`int`): of a calibration sequence.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where to measure.
    """
    context = replace(context, methods=context.methods.suited_to(context.decoder))
    config, methods, decoder = context.config, context.methods, context.decoder
    weights = [sum(weight.numel() for weight in block.module.parameters()) for block in decoder.blocks]
    narrower = sample_blocks.narrower(decoder, methods.saliency.updates_weights, device)
    own = sample_blocks.sample_decoder(
        decoder if narrower == 1 else sample_blocks.narrow_decoder(decoder, narrower), device
    )
    own_weights = [sum(weight.numel() for weight in block.module.parameters()) for block in own.blocks]
    edges = own_weights[:: max(1, len(own_weights) - 1)]
    scaled = sum(weights) / (1 if narrower == 1 else max(weights) / max(own_weights))
    middle = max(0.0, (scaled - sum(edges)) / own_weights[len(own_weights) // 2]) if len(weights) > 2 else 0.0
    scale = Scale(len(weights), middle, narrower, 1.0, config.num_samples, config.num_alignment_samples)
    refit_batch = Refit.batch_size(tokens) * FIT_BATCHES if config.refit_epochs else 0
    count = min(config.num_samples, max(batch_size, refit_batch))
    vocabulary = getattr(own.config, "vocab_size", None) or 2
    ids = torch.randint(0, vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0))
    runner = MeasuredRunner(own, batch_size, device)
    small = replace(config, num_alignment_samples=min(config.num_alignment_samples, batch_size, count))
    with inference(own.model):
        engine = make_engine(replace(context, config=small, cache=Cache()), runner, ids)
        rehearsal = Rehearsal(context, scale, engine)
        if methods.needs_calibration:
            rehearsal.check()
            engine.alignment_inputs()
        decided, allocation = allocate(context, rehearsal)
        refit = None
        if config.refit_epochs:
            refit = FirstEpoch(config.refit_epochs, config.refit_learning_rate, runner)
        rehearsal.final_pass(allocation.plan, decided.value_bits, refit)
    steps: dict[str, Step] = {}
    for step in rehearsal.steps:
        steps[step.label] = steps[step.label] + step if step.label in steps else step
    return list(steps.values())
