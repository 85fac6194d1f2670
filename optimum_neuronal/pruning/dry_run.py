"""Tells what a prune would do and cost, from the model's config alone: no weight and no text is read."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..engine.passes import Pass
from ..formats.bitmask import mask_length
from ..model.packed_size import packed_size
from ..model.projections import Block, Decoder
from ..sparsity.plan import row_counts
from ..system.machine import default_device
from ..trials.output_errors import piece_length
from .bit_budget import Pair, likely
from .context import check_unloaded
from .cost import PlannedSweep, forward_bytes, hidden_sequences, plan_sweeps
from .plan_table import plan_table
from .planned_passes import planned_passes
from .prune import default_batch_size
from .rates import Rates, measure_rates
from .solving_cost import FLOAT32, SolvingCost, solving_cost


RANKING = 4  # float32 copies of the largest weight while its mask is made: as it is, scored, sorted, pruned


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do and cost. `print(plan)` shows it as a table.

    Args:
        config (`dict`): the `NeuronALConfig`.
        model_type (`str`): the family of the decoder.
        dtype (`str`): of the weights and the hidden states: `"bfloat16"`.
        seq_length (`int`): tokens per calibration sequence.
        blocks, projections (`int`): decoder blocks, and pruned projections in them (every expert's counts).
        weights, pruned_weights (`int`): weights of the whole model, tied ones once, and of the pruned projections.
        zeros (`int`):
            How many of the latter become zero. A few more or less with a top-up that spreads sparsity unevenly: each
            matrix is rounded by itself.
        saved_bytes (`int`): the saved model in the dense format, as large as the unpruned one; without file headers.
        packed_saved_bytes (`int`): the same in the packed format.
        model_bytes (`int`): the model in memory.
        packed_model_bytes (`int`): the same after `sparsify`, if all pruned weights have a packed form.
        block_bytes (`int`): the largest block.
        outside_bytes (`int`): the part of the model outside its blocks, in memory: embeddings, head.
        trial_bytes (`int`): the second copy of a block's pruned weights that a trial computes with, at its largest.
        hidden_bytes (`int`): hidden states of calibration sequences, at their most.
        working_bytes (`int`): what exists for a moment: inside a block's forward, or of logits that are compared.
        mask_bytes (`int`): the masks, one bit per pruned weight.
        solving ([`SolvingCost`]): what reconstructing weights takes beside the passes.
        sweeps (`tuple[PlannedSweep, ...]`): passes over the blocks in their order; none if nothing is measured.
        device (`str`): where the rates were measured.
        rates ([`Rates`]): measured there.
    """

    config: dict[str, Any]
    model_type: str
    dtype: str
    seq_length: int
    blocks: int
    projections: int
    weights: int
    pruned_weights: int
    zeros: int
    saved_bytes: int
    packed_saved_bytes: int
    model_bytes: int
    packed_model_bytes: int
    block_bytes: int
    outside_bytes: int
    trial_bytes: int
    hidden_bytes: int
    working_bytes: int
    mask_bytes: int
    solving: SolvingCost
    sweeps: tuple[PlannedSweep, ...]
    pairs: tuple[Pair, ...]
    device: str
    rates: Rates

    @property
    def memory_bytes(self) -> int:
        """Model, trial weights, hidden states, masks, what solving takes and what exists for a moment, at their most."""
        solving = self.solving
        lasting = (
            self.trial_bytes + self.hidden_bytes + self.mask_bytes + max(solving.levels_bytes, solving.waiting_bytes)
        )
        return self.model_bytes + lasting + max(solving.solver_bytes, self.working_bytes)  # never at the same time

    @property
    def streamed_bytes(self) -> int:
        """At least needed with the blocks' weights on disk, of which two blocks are in memory at a time."""
        in_memory = min(self.model_bytes, self.outside_bytes + 2 * self.block_bytes)
        return self.memory_bytes - self.model_bytes + in_memory

    @property
    def block_forwards(self) -> int:
        """How often a block is run on one sequence; fewer if the top-up abandons candidates early."""
        return sum(sweep.block_forwards for sweep in self.sweeps)

    @property
    def operations(self) -> int:
        """Floating-point operations of all block forwards, and of the head."""
        return sum(sweep.operations for sweep in self.sweeps)

    @property
    def seconds(self) -> float:
        """Time of all that is counted, at the measured rates."""
        rates, made = self.rates, self.solving.made + sum(sweep.made for sweep in self.sweeps)
        computing = self.operations / rates.products + made / rates.made
        return computing + self.solving.operations / rates.solved + self.choosing_seconds + self.rounding_seconds

    @property
    def choosing_seconds(self) -> float:
        """The part of it in which weights are ranked, masks made and logits compared."""
        rates = self.rates
        return sum(
            sweep.compared / rates.compared + sweep.ranked / rates.ranked + sweep.masked / rates.masked
            for sweep in self.sweeps
        )

    @property
    def rounding_seconds(self) -> float:
        """The part of it in which values become few bits, but for the products in it."""
        return self.solving.fitted / self.rates.fitted + self.solving.swept / self.rates.swept

    def to_dict(self) -> dict[str, Any]:
        """All of it with the totals, JSON-serialisable."""
        totals = ("memory_bytes", "streamed_bytes", "block_forwards", "operations", "seconds")
        sweeps = [asdict(sweep) for sweep in self.sweeps]
        return {**asdict(self), "sweeps": sweeps, **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        """A table for the terminal."""
        return plan_table(self)


def plan_prune(
    model_or_path: str | Path,
    config: NeuronALConfig,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    batch_size: int | None = None,
) -> PrunePlan:
    """What [`NeuronALPruner.prune`] would do and cost, told from the model's config, without its weights.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model; of its files only the config is read.
        config ([`NeuronALConfig`]): how to prune.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"`: what the model's config says, or float32.
        revision (`str`, *optional*): branch, tag or commit of the model on the Hub.
        trust_remote_code (`bool`): whether to run code that comes with the model.
        device (`torch.device`, *optional*): whose speed is measured. None: the accelerator, or the CPU.
        batch_size (`int`, *optional*): as for [`NeuronALPruner.prune`].

    Raises:
        `ValueError`, `TypeError`, `OSError`: as the prune itself, as far as they can be known without weights.
    """
    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    context = check_unloaded(model_or_path, config, dtype, **options)
    decoder, model, config, pairs = context.decoder, context.model, context.config, context.pairs
    methods = context.methods.suited_to(decoder)
    tokens = resolve_seq_length(model.config, config.seq_length)
    passes, config = planned_passes(methods, config, pairs), likely(config, pairs)
    samples = config.num_samples, config.num_alignment_samples
    device = device or default_device()
    sequences = hidden_sequences(passes, *samples, len(decoder.blocks))
    return PrunePlan(
        config=config.to_dict(),
        model_type=decoder.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        seq_length=tokens,
        blocks=len(decoder.blocks),
        weights=sum(weight.numel() for weight in model.parameters()),
        **_projection_counts(decoder, config.sparsity),
        **_weight_bytes(model, decoder, config),
        trial_bytes=max(_trial_bytes(block) for block in decoder.blocks) if passes else 0,
        hidden_bytes=sequences * tokens * decoder.config.hidden_size * model.dtype.itemsize,
        working_bytes=_working_bytes(decoder, config, passes, tokens, device, batch_size) if passes else 0,
        solving=solving_cost(decoder, config, methods, tokens, pairs),
        sweeps=plan_sweeps(passes, decoder, tokens, *samples),
        pairs=tuple(pairs),
        device=str(device),
        rates=measure_rates(model.dtype, device, decoder.config.vocab_size),
    )


def _working_bytes(
    decoder: Decoder,
    config: NeuronALConfig,
    passes: Sequence[Pass],
    tokens: int,
    device: torch.device,
    batch_size: int | None,
) -> int:
    batch = tokens * min(batch_size or default_batch_size(tokens), config.num_samples)
    first = next(iter(decoder.projections.values())).owner
    forward = forward_bytes(decoder, batch, first.dtype.itemsize)
    largest = max(projection.numel for projection in decoder.projections.values())
    vocabulary = decoder.config.vocab_size
    logits = min(piece_length(vocabulary, device), tokens) * vocabulary
    comparing = max(step.logits for step in passes)
    return max(forward, RANKING * largest * FLOAT32, comparing * logits * FLOAT32)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@cache
def _zeros(sparsity: float, shape: tuple[int, int]) -> int:
    return int(row_counts(sparsity, shape).sum())


def _projection_counts(decoder: Decoder, sparsity: float) -> dict[str, int]:
    """The fields of the plan about what is pruned."""
    projections = decoder.projections.values()
    return {
        "projections": len(projections),
        "pruned_weights": sum(projection.numel for projection in projections),
        "zeros": sum(_zeros(sparsity, projection.shape) for projection in projections),
        "mask_bytes": sum(mask_length(projection.numel) for projection in projections),
    }


def _weight_bytes(model: PreTrainedModel, decoder: Decoder, config: NeuronALConfig) -> dict[str, int]:
    """The fields of the plan about the model's own weights, tied ones once."""
    saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    blocks = [sum(_size(weight) for weight in block.module.parameters()) for block in decoder.blocks]
    saved_bytes = sum(_size(tensor) for tensor in saved.values())
    in_memory = model.get_memory_footprint()  # with the buffers that are not saved
    bits = config.value_bits, config.embedding_bits
    packed = packed_size(decoder, lambda p: _zeros(config.sparsity, p.shape), *bits)
    return {
        "saved_bytes": saved_bytes,
        "packed_saved_bytes": saved_bytes - packed.dense + packed.saved,
        "model_bytes": in_memory,
        "packed_model_bytes": in_memory - packed.dense + packed.in_memory,
        "block_bytes": max(blocks),
        "outside_bytes": in_memory - sum(blocks),
    }


def _trial_bytes(block: Block) -> int:
    """Bytes of the weights that `trial_weights` makes anew: of experts all, if one of them is pruned."""
    return sum(_size(owner) for owner in {projection.owner for projection in block.pruned})
