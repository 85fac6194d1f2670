"""The rehearsal of a prune: its steps as the top-up asks for them, each kind measured once on a sample of the blocks."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..blocks.block_inputs import inference
from ..files.records import Finding
from ..model.projections import Block, Decoder
from ..saliency import Saliency
from ..saliency.plan import DENSE, Plan, RatePlan, SparsityPlan
from ..trials import Trials
from ..trials.alignment import Deviation
from ..trials.cache import Cache
from ..trials.solved import Solved, SolvedSparsities, SolvedWeights, heldout_sequences
from ..trials.trials import Score
from .context import PruneContext
from .final_pass import FinalPruning
from .prune import make_trials
from .refit import Refit
from .rehearsed_rotation import rehearse_rotation
from .sample_blocks import FirstEpoch, MeasuredRunner
from .work import COMPARING, FORWARDS, HIDDEN, KEPT, MIDDLE, MOMENT, OTHER, OUTSIDE, Step, Work


FEW, MANY = 2, 6  # plans that a question is measured with; the difference is the work of four further ones
FIT_BATCHES = 4  # of the sample, if there is a refit, which learns from all but the last


class Rehearsal:
    """A stand-in for [`Trials`] that answers a top-up's questions at random, and notes what they take.

    Args:
        context ([`PruneContext`]): of the prune, its model on the meta device.
        engine ([`Trials`]): of the sample, with a [`MeasuredRunner`] and sequences of its own.

    Attributes:
        steps (`list[Step]`): of the model, in their order.
    """

    def __init__(self, context: PruneContext, engine: Trials):
        self.engine, self.can_abandon = engine, engine.can_abandon
        self.steps: list[Step] = []
        self._context, self._config = context, context.config
        self._measured: dict[tuple, tuple[Any, Work]] = {}
        self._random = random.Random(0)
        self._base = self._plans(1)[0]  # of the sample, wherever a plan is a reference
        self._reference: SparsityPlan | None = None  # of the model, as last asked for

    @property
    def decoder(self) -> Decoder:
        return self._context.decoder

    @property
    def saliency(self) -> Saliency:
        return self.engine.saliency

    def solve(self, wanted: Solved) -> Solved:
        count = len(wanted.amounts)
        amount = wanted.amounts[count // 2]
        samples, own = self._config.num_samples, len(self.engine.ids)
        asked = self.ask(
            ("solve", amount),
            wanted.label,
            lambda _: self.engine.solve(replace(wanted, amounts=(amount,))),
            sequences=(samples - heldout_sequences(samples, self._config.num_alignment_samples))
            / (own - heldout_sequences(own, self.engine.num_alignment_samples)),
            times=count,
        )
        if not isinstance(asked, SolvedSparsities):
            return asked
        # Trials read the two nearest of several levels: the one that was solved serves as both.
        blocks = [found | {key.replace("@0", "@1"): value for key, value in found.items()} for found in asked.blocks]
        return replace(asked, amounts=(amount / 2, (1 + amount) / 2), blocks=blocks)

    def dense_scores(self, score: Score, label: str) -> list[list[float]]:
        return self._of_all_blocks(
            self.ask(
                ("dense", label), label, lambda _: self.engine.dense_scores(score, label), sequences=self.all_sequences
            )
        )

    def weight_scores(self, score: Callable[[Block], list], label: str) -> list[list]:
        return self._of_all_blocks(
            self.ask(("weights", label), label, lambda _: self.engine.weight_scores(score, label))
        )

    def own_runs(self, question: tuple, run: Callable[[Trials], Finding]) -> Any:
        return self.ask(question, question[0], lambda _: run(self.engine))[0]

    def alignment_errors(self, plans, reference, scope, metric, label, bound=math.inf) -> list[float]:
        return self._errors("alignment_errors", plans, reference, scope, metric, label)

    def reconstruction_errors(self, plans, reference, label) -> list[float]:
        return self._errors("reconstruction_errors", plans, reference, label)

    def output_errors(self, plans, metric, label, reference="dense", sequences=None) -> list[float]:
        aligned, own = self._config.num_alignment_samples, self.engine.num_alignment_samples
        few = sequences and min(sequences, own)
        more = {"shared": _shared(self.decoder, plans), "sequences": min(sequences or aligned, aligned) / (few or own)}
        if not isinstance(reference, SparsityPlan):
            return self._errors("output_errors", plans, metric, label, reference, few, **more)
        self._run_stream(reference, label)
        itself = plans[0] is reference  # its stream has run already

        def ask(own_plans: list[SparsityPlan]) -> list[float]:
            return self.engine.output_errors([self._base] if itself else own_plans, metric, label, self._base, few)

        self.ask(("outputs", metric, itself, few), label, ask, plans, **more)
        return self._numbers(plans)

    def deviation(self, plan, reference, scope, metric, label) -> Deviation:
        (error,) = self._errors("deviation", [plan], reference, scope, metric, label)
        decoder = self.decoder
        places = {decoder.place_fed_by(block, p) for block in decoder.blocks for p in block.pruned} - {None}
        return Deviation(error, {place.name: torch.tensor(self._numbers(range(place.features))) for place in places})

    def row_saliency(self, plan, label) -> dict[str, torch.Tensor]:
        self._run_stream(plan, label)
        self.ask(("rows",), label, lambda _: self.engine.row_saliency(self._base, label))
        projections = self.decoder.projections.items()
        return {name: torch.tensor(self._numbers(range(p.shape[0]))) for name, p in projections}

    @property
    def all_sequences(self) -> float:
        """The number of calibration sequences, as a multiple of the sample's."""
        return self._config.num_samples / len(self.engine.ids)

    def check(self) -> None:
        """Note the check of the replay, on one sequence."""
        runner = self.engine.runner

        def run(_) -> None:
            inputs = runner.capture(self.engine.ids[:1])
            runner.run(inputs, 1, runner.pass_on, "Check")

        self.ask(("check",), "Check", run, sequences=1)

    def prune(self, plan: Plan, refit: Refit | None) -> None:
        """Note the final pass with a plan of the model."""
        final = FinalPruning.by(self._context.methods, self.engine, self._plans(1, plan)[0], refit)
        self.ask(("final",), "Pruning", lambda _: final.find(), sequences=self.all_sequences)

    def _run_stream(self, plan: SparsityPlan, label: str | None) -> None:
        """Note the run of a plan's own stream, unless it was the last."""
        if plan is not self._reference:
            self.ask(("stream",), label, lambda _: self.engine.stream_of(self._base))
            self._reference = plan

    def _errors(self, name: str, plans: Sequence[Plan], *args, **more) -> list[float]:
        """Note a question of this name to [`Trials`], and return an error for every plan."""
        label = args[1] if name == "output_errors" else args[-1]
        question = (name, *(type(arg) if isinstance(arg, SolvedWeights) else arg for arg in args))
        asks_one = name == "deviation"
        self.ask(
            question, label, lambda own: getattr(self.engine, name)(own[0] if asks_one else own, *args), plans, **more
        )
        return self._numbers(plans)

    def ask(
        self,
        question: tuple,
        label: str | None,
        ask: Callable[[list], Any],
        plans: Sequence[Plan] = (),
        shared: float | None = None,
        sequences: float | None = None,
        times: int = 1,
    ) -> Any:
        """Note a question to the model, and return the answer of the sample, which is asked once.

        Args:
            question (`tuple`): all that the work depends on, but for the number of plans.
            label (`str`, *optional*): of the step.
            ask: plans of the sample -> its answer.
            plans (`Sequence[Plan]`): of the model.
            shared (`float`, *optional*): how many of them a block runs on average. None: all.
            sequences (`float`, *optional*): the model's sequences, in the sample's. None: alignment sequences.
            times (`int`): how often the model does what does not depend on the sequences.
        """
        label, count, key = label or "Top-up", len(plans), question
        sizes = min(count, FEW), min(count, MANY)
        aligned = self._config.num_alignment_samples / self.engine.num_alignment_samples
        for size in sizes:
            if (key, size) not in self._measured:
                own = self._plans(size, *plans[:1])
                answer, works = self.engine.runner.measure(label, lambda own=own: ask(own))
                self._measured[key, size] = answer, works.pop(label)
                self.steps += [self._step(name, 0, work, work, aligned) for name, work in works.items()]
        (_, few), (answer, many) = (self._measured[key, size] for size in sizes)
        further = (sizes[1] - sizes[0]) or 1
        inside, outside = (few.toward(many, (n - sizes[0]) / further) for n in (shared or count, count))
        self.steps.append(self._step(label, count, inside, outside, sequences or aligned, times))
        return answer

    def _step(self, label: str, plans: int, inside: Work, outside: Work, sequences: float, times: int = 1) -> Step:
        """Return a step of the model from the work on the sample, inside and outside of blocks."""
        blocks, spent = len(self.decoder.blocks), np.array(inside.spent)
        middle = self.engine.runner.middle
        spent[OUTSIDE] = outside.spent[OUTSIDE]
        spent[OUTSIDE, OTHER] *= sequences / times
        spent[MIDDLE] *= [middle, middle, max(0, blocks - 2)]
        spent *= [sequences, times, sequences]
        return Step(
            label,
            plans,
            round(spent[:, FORWARDS].sum()),
            float(spent[:, :FORWARDS].sum()),
            int(max(inside.memory[MOMENT], outside.memory[COMPARING])),
            int(inside.memory[HIDDEN] * sequences),
            int(inside.memory[KEPT] * times * (middle + min(blocks, 2))),
        )

    def _plans(self, count: int, like: Plan | None = None) -> list:
        """Return plans of the sample that share no block, of the kind of the given one."""
        if isinstance(like, RatePlan):
            return self._rate_plans(count, like)
        target, projections = self._config.sparsity or 0.5, self.engine.decoder.projections
        by_row = like is not None and any(getattr(value, "ndim", 0) for value in like.sparsity.values())
        found = []
        for index in range(count):
            sparsity = target * (1 - 0.01 * index)
            rows = {name: torch.full((p.shape[0],), sparsity, dtype=torch.float64) for name, p in projections.items()}
            found.append(SparsityPlan(rows if by_row else dict.fromkeys(projections, sparsity)))
        return found

    def _rate_plans(self, count: int, like: RatePlan) -> list[RatePlan]:
        """Return plans of the sample with the most common rate of the given one; where it leaves some dense, they do, too."""
        usual = statistics.mode(bits for bits in like.bits.values() if bits != DENSE)
        if DENSE not in like.bits.values():
            return [RatePlan(dict.fromkeys(self.engine.decoder.projections, usual))] * count
        found = []
        for number in range(1, count + 1):  # in the binary system: which projections of a block are quantised
            chosen = [
                (p.name, number >> place & 1) for b in self.engine.decoder.blocks for place, p in enumerate(b.pruned)
            ]
            found.append(RatePlan({name: usual if own else DENSE for name, own in chosen}))
        return found

    def _numbers(self, things: Sequence) -> list[float]:
        return [1 + self._random.random() for _ in things]

    def _of_all_blocks(self, found: list[list]) -> list[list]:
        """Return numbers for the model's blocks that are near to the numbers of the sample's first pruned block."""
        first = next(values for values in found if values)
        return [
            [value and value * (1 + 0.1 * self._random.random()) for value in first] if block.pruned else []
            for block in self.decoder.blocks
        ]


def _shared(decoder: Decoder, plans: Sequence[Plan]) -> float:
    """Return how many of the plans a block runs on average: plans that are equal up to a block share it."""
    paths, runs = [0] * len(plans), 0
    for block in decoder.blocks:
        known: dict[tuple, int] = {}
        for index, plan in enumerate(plans):
            key = (paths[index], plan.key(block.pruned_names))
            paths[index] = known.setdefault(key, len(known))
        runs += len(known)
    return runs / len(decoder.blocks)


def rehearse(context: PruneContext, tokens: int, batch_size: int, device: torch.device) -> list[Step]:
    """Return the steps of a prune in their order, all of one label together.

    Args:
        context ([`PruneContext`]): of the prune, its model on the meta device.
        tokens (`int`): of a calibration sequence.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where to measure.
    """
    context = replace(context, methods=context.methods.suited_to(context.decoder))
    config, methods = context.config, context.methods
    solves = methods.saliency.updates_weights or methods.rotation is not None
    runner = MeasuredRunner.of(context.decoder, solves, tokens, batch_size, device)
    fits = FIT_BATCHES * Refit.batch_size(tokens) if config.refit_epochs else 0
    count = min(config.num_samples, max(batch_size * tokens // runner.tokens, fits))
    vocabulary = getattr(runner.decoder.config, "vocab_size", None) or 2
    ids = torch.randint(0, vocabulary, (count, runner.tokens), generator=torch.Generator().manual_seed(0))
    small = replace(config, num_alignment_samples=min(config.num_alignment_samples, batch_size, count))
    with inference(runner.decoder.model):
        engine = make_trials(replace(context, config=small, cache=Cache()), runner, ids)
        rehearsal = Rehearsal(context, engine)
        if methods.needs_calibration:
            rehearsal.check()
            engine.alignment_inputs()
        if methods.rotation is not None:
            rehearse_rotation(rehearsal, methods.rotation)
        allocation = methods.topup.allocate(rehearsal, config.amount)
        refit = FirstEpoch(config.refit_epochs, config.refit_learning_rate, runner) if config.refit_epochs else None
        rehearsal.prune(allocation.plan, refit)
    steps: dict[str, Step] = {}
    for step in rehearsal.steps:
        steps[step.label] = steps[step.label] + step if step.label in steps else step
    return list(steps.values())
