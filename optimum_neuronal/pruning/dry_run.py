"""Tells what a prune would do and cost, from the model's config alone: no weight and no text is read."""

from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.packed_size import packed_size
from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..decoder.checking import check_model
from ..decoder.finding import find_decoder
from ..decoder.loading import load_skeleton
from ..decoder.placement import default_device
from ..decoder.projections import Block, Decoder, Projection
from ..engine.passes import Pass
from ..methods import Methods
from ..sparsity.bitmask import mask_length
from ..sparsity.plan import row_counts
from .cost import PlannedSweep, all_passes, hidden_sequences, measure_matmul_rate, plan_sweeps
from .dense_targets import DenseTargetsPass
from .final_pruning import PruningPass, needs_inputs
from .plan_table import plan_table
from .refit import RefitPass
from .solving_cost import SolvingCost, solving_cost


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
        mask_bytes (`int`): the masks, one bit per pruned weight.
        solving ([`SolvingCost`]): what reconstructing weights takes beside the passes.
        sweeps (`tuple[PlannedSweep, ...]`): passes over the blocks in their order; none if nothing is measured.
        device (`str`): where the rate was measured.
        operations_per_second (`float`): measured rate of matrix products in this dtype on this device.
        solved_per_second (`float`): the same in float32, in which weights are reconstructed.
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
    mask_bytes: int
    solving: SolvingCost
    sweeps: tuple[PlannedSweep, ...]
    device: str
    operations_per_second: float
    solved_per_second: float

    @property
    def memory_bytes(self) -> int:
        """Model, trial weights, hidden states, masks, and what solving takes: at least this much is needed."""
        solving = self.solving.solver_bytes + max(self.solving.levels_bytes, self.solving.waiting_bytes)
        return self.model_bytes + self.trial_bytes + self.hidden_bytes + self.mask_bytes + solving

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
        """Floating-point operations of all block forwards."""
        return sum(sweep.operations for sweep in self.sweeps)

    @property
    def seconds(self) -> float:
        """Time of these operations at the measured rates: a lower bound, unless candidates are abandoned early."""
        solving = self.solving.operations / self.solved_per_second
        return self.operations / self.operations_per_second + solving

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
) -> PrunePlan:
    """What [`NeuronALPruner.prune`] would do and cost, told from the model's config, without its weights.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model; of its files only the config is read.
        config ([`NeuronALConfig`]): how to prune.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"`: what the model's config says, or float32.
        revision (`str`, *optional*): branch, tag or commit of the model on the Hub.
        trust_remote_code (`bool`): whether to run code that comes with the model.
        device (`torch.device`, *optional*): whose speed is measured. None: the accelerator, or the CPU.

    Raises:
        `ValueError`, `TypeError`, `OSError`: as the prune itself, as far as they can be known without weights.
    """
    model = _skeleton(model_or_path, dtype, revision=revision or "main", trust_remote_code=trust_remote_code)
    decoder = find_decoder(model, config.targets, config.ignore)
    methods = config.make_methods()
    methods.topup.check(decoder)
    tokens = resolve_seq_length(model.config, config.seq_length)
    passes = _passes(methods, config)
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
        **_weight_bytes(model, decoder, config.sparsity),
        trial_bytes=max(_trial_bytes(block) for block in decoder.blocks) if passes else 0,
        hidden_bytes=sequences * tokens * decoder.config.hidden_size * model.dtype.itemsize,
        solving=solving_cost(decoder, replace(config, seq_length=tokens), methods),
        sweeps=plan_sweeps(passes, decoder, tokens, *samples),
        device=str(device),
        operations_per_second=measure_matmul_rate(model.dtype, device),
        solved_per_second=measure_matmul_rate(torch.float32, device),
    )


def _passes(methods: Methods, config: NeuronALConfig) -> list[Pass]:
    """Everything that runs blocks, in order; nothing if no activations are looked at."""
    if not methods.needs_calibration:
        return []
    final = []
    if needs_inputs(methods.saliency, methods.topup.statistic):
        final.append((DenseTargetsPass if methods.needs_dense_stream else PruningPass)("Pruning", 1))
    if config.refit_epochs:
        final.append(RefitPass("Refit", 0, epochs=config.refit_epochs))
    return list(all_passes(methods.topup.passes_with(methods.saliency), final))


def _skeleton(model_or_path: str | Path, dtype: str | torch.dtype, **options) -> PreTrainedModel:
    """The model without weights, if it can be pruned."""
    model = load_skeleton(model_or_path, dtype, **options)
    if read_sparsity_config(model.config) is not None:
        raise ValueError("The model is sparse already (its config has a sparsity_config): plan with the dense model.")
    check_model(model)
    return model


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weights(projection: Projection) -> int:
    return projection.shape[0] * projection.shape[1]


@cache
def _zeros(sparsity: float, shape: tuple[int, int]) -> int:
    return int(row_counts(sparsity, shape).sum())


def _projection_counts(decoder: Decoder, sparsity: float) -> dict[str, int]:
    """The fields of the plan about what is pruned."""
    projections = decoder.projections.values()
    return {
        "projections": len(projections),
        "pruned_weights": sum(_weights(projection) for projection in projections),
        "zeros": sum(_zeros(sparsity, projection.shape) for projection in projections),
        "mask_bytes": sum(mask_length(_weights(projection)) for projection in projections),
    }


def _weight_bytes(model: PreTrainedModel, decoder: Decoder, sparsity: float) -> dict[str, int]:
    """The fields of the plan about the model's own weights, tied ones once."""
    saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    blocks = [sum(_size(weight) for weight in block.module.parameters()) for block in decoder.blocks]
    saved_bytes = sum(_size(tensor) for tensor in saved.values())
    in_memory = model.get_memory_footprint()  # with the buffers that are not saved
    packed = packed_size(decoder, lambda projection: _zeros(sparsity, projection.shape))
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
