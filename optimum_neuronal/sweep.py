"""The only loop over a model's blocks: dense activations, trial plans, and the final masks.

Every pass visits the blocks in order and carries *streams* of hidden states from one to the next, one stream for each
candidate, so that all candidates visit a block together and share what is the same for them.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from .alignment import total_error
from .capture import (
    BlockInputs,
    Call,
    Wrap,
    capture_inputs,
    hidden_bytes,
    replay,
    to_device,
)
from .checks import check_replay
from .experts import projection_activations
from .journal import Journal
from .masks import Cut, PackedMask, SparsityPlan, apply_cut, find_cut, prune_rows, sort_rows
from .offload import BlockLoader, is_offloaded
from .processes import Processes
from .projections import Block, Decoder, Projection, trial_weights
from .saliency import Saliency
from .statistics import Norms, SquaredNorms, activation
from .unfinished import Hidden, recall_sweep, record_sweep


REFERENCES = ("sparse-stream", "dense")
RECORD_EVERY = 60.0  # seconds between two records of an unfinished sweep

Visit = Callable[[int, Block, Sequence[Call], list[Hidden]], list[Hidden]]
MaskOf = Callable[[Projection], torch.Tensor]
Refine = Callable[[Projection, torch.Tensor, torch.Tensor | None], torch.Tensor]


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


class Sweep:
    """Runs a decoder block by block over calibration sequences. Use it inside [`capture.inference`].

    Args:
        decoder ([`Decoder`]): the model's blocks and projections. Its weights are the same after every call.
        saliency ([`Saliency`]): scores the weights.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.
        num_alignment_samples (`int`): how many of them, from the first, trials are measured on.
        batch_size (`int`): sequences per forward.
        device (`torch.device`): where the decoder expects token ids.
        min_expert_tokens (`int`): an expert that receives fewer falls back, see [`projection_activations`].
        max_hidden_bytes (`int`, *optional*): more hidden states than this are kept in CPU memory between blocks.
        journal ([`Journal`], *optional*): where finished steps and blocks are recorded, and looked up.
        processes ([`Processes`], *optional*): with whom the work is shared.

    Attributes:
        block_forwards (`int`): how often a block was run on one sequence, so far: the cost of everything.
        starved_experts (`list[str]`): the experts' projections that fell back in `final_masks`.
    """

    def __init__(
        self,
        decoder: Decoder,
        saliency: Saliency,
        ids: torch.Tensor,
        num_alignment_samples: int,
        batch_size: int = 1,
        device: torch.device | str = "cpu",
        min_expert_tokens: int = 1,
        max_hidden_bytes: int | None = None,
        journal: Journal | None = None,
        processes: Processes | None = None,
    ):
        self.decoder, self.saliency, self.ids = decoder, saliency, ids
        self.num_alignment_samples, self.batch_size, self.device = num_alignment_samples, batch_size, device
        self.min_expert_tokens, self.max_hidden_bytes = min_expert_tokens, max_hidden_bytes
        self.journal, self.processes = journal or Journal(), processes or Processes()
        self.loader = BlockLoader(decoder.blocks)
        self._recorded_at = time.monotonic()
        self._wrap: Wrap | None = None
        self.block_forwards = 0
        self.starved_experts: list[str] = []
        self._inputs: BlockInputs | None = None
        self._dense: tuple[list[Norms], SquaredNorms] | None = None

    def check_replay(self) -> None:
        """Raises `ValueError` unless replaying the blocks gives what the model computes: see [`checks.check_replay`]."""
        self._wrap = check_replay(self.decoder, self.ids[:1], self.device, self.loader)
        self.block_forwards += len(self.decoder.blocks)

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

        return self._once(plans, (reference, scope, metric, label, bound), measure)[0]

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
            unread = self._output_projections(block) if block is self.decoder.blocks[-1] else ()
            for members in _grouped(streams, shared=reference == "dense"):
                norms = self._reference(reference, index, block, streams[members[0]], calls)
                activations, _ = projection_activations(block, norms, self.min_expert_tokens)
                masks = self._masks(block, activations, [plans[member] for member in members])
                for member, mask_of in zip(members, masks):
                    with trial_weights(block.pruned, mask_of):
                        output, sparse = self._replay(block, streams[member], calls, skipped=unread)
                    kept[f"{member}.{index}"] = total_error(block.pruned, norms, sparse, *measured_on)
                    if bound == math.inf or self._total(so_far(member)) <= bound:
                        outputs[member] = output
            return outputs

        if not plans:
            return []
        self._sweep(self._alignment_inputs(), len(plans), visit, label, kept, name)
        blocks = len(self.decoder.blocks)
        errors = [self._total(so_far(member)) for member in range(len(plans))]
        finished = [f"{member}.{blocks - 1}" in kept for member in range(len(plans))]
        return [error if done else math.inf for error, done in zip(errors, finished)]

    def deviation(self, plan: SparsityPlan, reference: str, scope: str, metric: str, label: str) -> Deviation:
        """Alignment error of one plan, and the deviation at every place that rows feed. Arguments as above.

        With `"sparse-stream"` a block's first input is the same in both runs. There the rows of the block before
        are compared by that block's two outputs, each as this block's first projection receives it.
        """

        def measure(name: str) -> tuple[float, dict[str, torch.Tensor]]:
            return self._deviation(plan, reference, (scope, metric), label, name)

        found = self._once([plan], (reference, scope, metric, label), measure)
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
                dense_output, norms = self._replay(block, hidden, calls)
            activations, _ = projection_activations(block, norms, self.min_expert_tokens)
            (mask_of,) = self._masks(block, activations, [plan])
            with trial_weights(block.pruned, mask_of):
                output, sparse = self._replay(block, hidden, calls)
            kept[f"error {index}"] = total_error(block.pruned, norms, sparse, *measured_on)
            if index > 0:
                before = norms
                if reference != "dense":  # only the first input is wanted, so no projection need be computed
                    before = self._replay(block, dense_hidden, calls, skipped=list(block.projections.values()))[1]
                entry = block.entry
                kept[f"place {self.decoder.blocks[index - 1].name}"] = _difference(before[entry], sparse[entry])
            for place, difference in self._deviations(block, norms, sparse).items():
                kept[f"place {place}"] = difference
            return [output, dense_output]

        inputs = self._alignment_inputs()
        output, dense_output = self._sweep(inputs, 2, visit, label, kept, name)
        dense_final = self._dense_pass()[1] if reference == "dense" else _final_norms(inputs.final_norm, dense_output)
        last = _difference(dense_final, _final_norms(inputs.final_norm, output))
        kept[f"place {self.decoder.blocks[-1].name}"] = last
        errors = [kept[f"error {index}"] for index in range(len(self.decoder.blocks))]
        places = {key.removeprefix("place "): value for key, value in kept.items() if key.startswith("place ")}
        return self._total(errors), {place: value.double().cpu() for place, value in places.items()}

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

    def final_masks(self, plan: SparsityPlan, refine: Refine | None = None) -> dict[str, PackedMask]:
        """The masks of a plan, block by block over all sequences, each block seeing the pruned blocks before it.

        Args:
            plan ([`SparsityPlan`]): sparsity of every projection or row.
            refine (*optional*): projection, mask, activation -> mask; applied to every mask.

        Returns:
            `dict[str, PackedMask]`: projection name -> mask. No weight is changed.
        """
        masks: dict[str, PackedMask] = {}

        def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
            def prune() -> tuple[dict, dict[str, torch.Tensor]]:
                norms = self._reference("sparse-stream", index, block, streams[0], calls)
                return self._prune_block(block, self._joined(norms), plan, refine)

            masks.update(self._masks_of(index, block, prune))
            if block is self.decoder.blocks[-1]:
                return streams  # nothing reads the last block's output
            with trial_weights(block.pruned, lambda p: masks[p.name].unpack(p.weight.device)):
                return [self._replay(block, streams[0], calls, record=False)[0]]

        self.starved_experts = []
        if self.saliency.uses_activations:
            self._inputs = self._dense = None
            inputs = self._capture(self.ids[self.processes.part(len(self.ids))])
            self._sweep(inputs, 1, visit, "Pruning", release=True)
        else:
            for index in range(len(self.decoder.blocks)):
                with self.loader.loaded(index) as block:
                    masks.update(self._masks_of(index, block, partial(self._prune_block, block, None, plan, refine)))
        return masks

    def _prune_block(
        self, block: Block, norms: Norms | None, plan: SparsityPlan, refine: Refine | None
    ) -> tuple[dict, dict[str, torch.Tensor]]:
        """The starved experts of a block, and its masks' bits by projection."""
        activations, starved = {}, []
        if norms is not None:
            activations, starved = projection_activations(block, norms, self.min_expert_tokens)
        bits, finite = {}, []
        for projection in block.pruned:
            name, score = projection.name, self._score(projection, activations)
            finite.append(torch.isfinite(score).all())
            mask = prune_rows(score, plan.row_counts(name, projection.shape))
            if refine is not None:
                mask = refine(projection, mask, activations.get(name))
            bits[name] = PackedMask.pack(mask).bits
        for name, is_finite in zip(bits, torch.stack(finite).tolist() if finite else ()):
            if not is_finite:
                raise ValueError(f"The saliency of {name} is not finite: its inputs overflow in the model's dtype.")
        return {"starved": starved}, bits

    def _masks_of(self, index: int, block: Block, prune: Callable) -> dict[str, PackedMask]:
        """The masks of one block, recorded or made now."""
        found, bits = self._recorded(f"block-{index:05d}", prune)
        self.starved_experts += found["starved"]
        return {p.name: PackedMask(bits[p.name].to(self._mask_device(p)), p.shape) for p in block.pruned}

    def _once(
        self,
        plans: Sequence[SparsityPlan],
        asked: tuple,
        measure: Callable[[str], tuple[Any, dict[str, torch.Tensor]]],
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """What a step measures, recorded or measured now: a JSON value and tensors.

        Recorded under what was asked of it, since another number of processes or weights on disk ask otherwise.
        """
        if not self.journal.keeps and self.processes.count == 1:
            return measure("")
        digest = hashlib.sha256(repr(asked).encode())
        for name, value in (item for plan in plans for item in plan.sparsity.items()):
            digest.update(name.encode() + torch.as_tensor(value, dtype=torch.float64).numpy().tobytes())
        name = f"step-{digest.hexdigest()[:16]}"
        found = self._recorded(name, partial(measure, f"{name}-unfinished"))
        self.journal.drop(f"{name}-unfinished")
        return found

    def _recorded(self, name: str, make: Callable[[], tuple[Any, dict[str, torch.Tensor]]]):
        found = self.processes.from_first(self.journal.get(name))
        if found is None:
            found = make()
            if self.processes.rank == 0:
                self.journal.put(name, *found)
        return found

    def _joined(self, norms: Norms) -> Norms:
        """Norms over the sequences of all processes, in their order."""
        if not self.processes.shares(len(self.ids)):
            return norms
        joined: dict[int, SquaredNorms] = {}
        for norm in norms.values():
            if id(norm) not in joined:
                tokens = sum(self.processes.collect([norm.tokens]))
                joined[id(norm)] = SquaredNorms.of(self.processes.join(norm.value, len(self.ids)), tokens)
        return {name: joined[id(norm)] for name, norm in norms.items()}

    def _mask_device(self, projection: Projection) -> torch.device:
        """Masks of offloaded weights wait in CPU memory, like the weights."""
        return torch.device("cpu") if is_offloaded(projection.module) else projection.weight.device

    def _sweep(
        self,
        inputs: BlockInputs,
        streams: int,
        visit: Visit,
        label: str | None,
        kept: dict[str, torch.Tensor] | None = None,
        name: str = "",
        release: bool = False,
    ) -> list[Hidden]:
        """Visits all blocks in order. With `name`, records every now and then how far it has come, with what it has
        `kept`, and goes on from where an interrupted sweep of that name was recorded. With `release`, nobody else needs
        the first block's inputs."""
        start, hidden = 0, [inputs.hidden] * streams
        records = bool(name) and self.processes.count == 1
        if records and (found := recall_sweep(self.journal, name, inputs.hidden)):
            start, hidden, measured = found
            kept.update(measured)
        if release:
            inputs.hidden = []
        quiet = label is None or self.processes.rank > 0
        for index in logging.tqdm(range(len(inputs.calls)), desc=label, unit="block", leave=False, disable=quiet):
            if index < start:
                continue
            with self.loader.loaded(index) as block:
                hidden = self._within_budget(visit(index, block, inputs.calls[index], hidden))
            if records and self.journal.keeps and time.monotonic() - self._recorded_at > RECORD_EVERY:
                record_sweep(self.journal, name, index + 1, hidden, kept)
                self._recorded_at = time.monotonic()
        return hidden

    def _capture(self, ids: torch.Tensor) -> BlockInputs:
        budget = self.max_hidden_bytes
        return capture_inputs(
            self.decoder, ids, self.batch_size, self.device, wrap=self._wrap, max_hidden_bytes=budget
        )

    def _within_budget(self, streams: list[Hidden]) -> list[Hidden]:
        """The same hidden states, in CPU memory if they are more than `max_hidden_bytes`."""
        if self.max_hidden_bytes is None or hidden_bytes(streams) <= self.max_hidden_bytes:
            return streams
        moved: dict[int, torch.Tensor] = {}
        for states in (states for stream in streams for states in stream):
            if id(states) not in moved:
                moved[id(states)] = to_device(states, torch.device("cpu"))
        lists: dict[int, Hidden] = {}  # streams that are the same stay so
        return [lists.setdefault(id(stream), [moved[id(states)] for states in stream]) for stream in streams]

    def _replay(
        self,
        block: Block,
        hidden: Hidden,
        calls: Sequence[Call],
        record: bool = True,
        skipped: Sequence[Projection] = (),
    ) -> tuple[Hidden, Norms]:
        self.block_forwards += sum(len(states) for states in hidden)
        # Experts always run as they do while they are recorded: sequence by sequence, whatever the batch.
        return replay(block, hidden, calls, record or bool(block.experts), skipped)

    def _output_projections(self, block: Block) -> list[Projection]:
        """What only feeds the block's output (an eighth of a Llama's work), skipped where norms are all we want."""
        return [p for p in block.projections.values() if self.decoder.feeds_next_block(block, p)]

    def _alignment_inputs(self) -> BlockInputs:
        if self._inputs is None:
            ids = self.ids[: self.num_alignment_samples]
            self._inputs = self._capture(ids)
        return self._inputs

    def _dense_pass(self) -> tuple[list[Norms], SquaredNorms]:
        if self._dense is None:
            per_block: list[Norms] = []

            def visit(index: int, block: Block, calls: Sequence[Call], streams: list[Hidden]) -> list[Hidden]:
                output, norms = self._replay(block, streams[0], calls)
                per_block.append(norms)
                return [output]

            inputs = self._alignment_inputs()
            (output,) = self._sweep(inputs, 1, visit, "Dense activations")
            self._dense = per_block, _final_norms(inputs.final_norm, output)
        return self._dense

    def _reference(self, reference: str, index: int, block: Block, hidden: Hidden, calls: Sequence[Call]) -> Norms:
        """What the dense block's projections receive: in the dense model, or on these hidden states."""
        if reference == "dense":
            return self.dense_norms()[index]
        return self._replay(block, hidden, calls, skipped=self._output_projections(block))[1]

    def _score(self, projection: Projection, activations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.saliency.score(projection.weight.float(), activations.get(projection.name))

    def _masks(
        self, block: Block, activations: Mapping[str, torch.Tensor], plans: Sequence[SparsityPlan]
    ) -> list[MaskOf]:
        """For every plan, a function from projection to mask; only one mask exists at a time.

        The weights of a row are ranked once for all plans. What is kept of the ranking is where each plan cuts it.
        """

        def counts(plan: SparsityPlan, projection: Projection) -> torch.Tensor:
            return plan.row_counts(projection.name, projection.shape)

        if len(plans) == 1:
            return [lambda projection: prune_rows(self._score(projection, activations), counts(plans[0], projection))]
        cuts: dict[str, list[Cut]] = {}
        for projection in block.pruned:
            ranked = sort_rows(self._score(projection, activations))
            cuts[projection.name] = [find_cut(ranked, counts(plan, projection)) for plan in plans]

        def mask_of(index: int) -> MaskOf:
            return lambda projection: apply_cut(self._score(projection, activations), cuts[projection.name][index])

        return [mask_of(index) for index in range(len(plans))]

    def _total(self, per_block: list[torch.Tensor]) -> float:
        errors = torch.stack([error.cpu() for error in per_block])  # blocks may lie on several devices
        if not bool(torch.isfinite(errors).all()):
            block = self.decoder.blocks[int((~torch.isfinite(errors)).nonzero()[0])]
            raise ValueError(f"Activations in {block.name} are not finite: they overflow in the model's dtype.")
        return errors.sum().item()


def _grouped(streams: list[Hidden], shared: bool) -> list[list[int]]:
    """Indices of streams that share the dense block's activations: those with the very same hidden states.

    Streams without any were abandoned.
    """
    groups: dict[int, list[int]] = {}
    for index, stream in enumerate(streams):
        if not stream:
            continue
        groups.setdefault(0 if shared else id(stream), []).append(index)
    return list(groups.values())


def _difference(dense: SquaredNorms, sparse: SquaredNorms) -> torch.Tensor:
    return activation(dense.value) - activation(sparse.value)


def _final_norms(final_norm: nn.Module | None, hidden: Hidden) -> SquaredNorms:
    norms = SquaredNorms()
    for states in hidden:
        norms.update(states if final_norm is None else final_norm(states), len(states))
    return norms
