"""A dry run: what a prune would do, measured on a few blocks with random weights. No weight and no text is read."""

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..common.display import format_bytes, format_count, format_duration, format_table
from ..common.machine import default_device
from ..config.neuronal_config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..report import method_text
from ..rotation.rotated_weights import find_rotated
from ..rotation.sensitivity import LABEL as ROTATION
from ..saliency.plan import row_counts
from .context import PruneContext, check_unloaded, default_batch_size
from .rehearsal import rehearse
from .rehearsed_rotation import drawn_bytes
from .reporting import expected_size
from .work import Step


FINAL = "Pruning"  # label of the step behind the top-up's; the rotation's precede them


@dataclass(frozen=True)
class PrunePlan:
    """The work and the cost of a prune. `print(plan)` shows it as a table.

    Args:
        config (`dict`): the `NeuronALConfig`.
        model_type (`str`): the family of the decoder.
        dtype (`str`): of the weights and the hidden states: `"bfloat16"`.
        seq_length (`int`): tokens per calibration sequence.
        blocks, projections (`int`): decoder blocks, and pruned projections in them (every expert's counts).
        weights, pruned_weights (`int`): weights of the whole model, tied ones once, and of the pruned projections.
        zeros (`int`):
            Pruned weights that become zero. A few more or less with a top-up that spreads sparsity unevenly: each matrix
            is rounded by itself. 0 if weights are quantised.
        saved_bytes (`int`): the saved model in the dense format, as large as the unpruned one; without file headers.
        packed_saved_bytes (`int`): the saved model in the packed format.
        bits_per_weight (`float`): of the pruned projections, packed.
        model_bytes (`int`): the model in memory.
        packed_model_bytes (`int`): the model in memory with packed modules, if all pruned weights have a packed form.
        block_bytes (`int`): the largest block.
        outside_bytes (`int`): the part of the model outside its blocks, in memory: embeddings, head.
        originals_bytes (`int`):
            Copies of the weights that a rotation changes, in CPU memory; 0 without a rotation. Weights on disk need none.
        drawn_bytes (`int`): rows that the learning of a rotation draws from weights on disk.
        copied_bytes (`int`): rows that it draws from weights in memory; 0 if it looks at all of them, where they are.
        alignment_bytes (`int`): hidden states in front of the first block and behind the last one, which the top-up keeps.
        steps (`tuple[Step, ...]`): in their order, with what each takes.
        device (`str`): where the steps were measured.
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
    bits_per_weight: float
    model_bytes: int
    packed_model_bytes: int
    block_bytes: int
    outside_bytes: int
    originals_bytes: int
    drawn_bytes: int
    copied_bytes: int
    alignment_bytes: int
    steps: tuple[Step, ...]
    device: str

    @property
    def working_bytes(self) -> int:
        """Memory above the model, at its most."""
        return self._working_bytes(self.copied_bytes)

    def _working_bytes(self, drawn: int) -> int:
        """Return it, if so many bytes more exist while a rotation is learned."""
        phases: dict[str, list[Step]] = {ROTATION: [], "search": [], "final": []}
        for step in self.steps:
            phase = "final" if step.label == FINAL else ROTATION if step.label == ROTATION else "search"
            phases[phase].append(step)
        beside = {ROTATION: drawn, "search": self.alignment_bytes, "final": 0}
        return max(
            (
                step.moment_bytes + step.hidden_bytes + beside[phase] + sum(other.kept_bytes for other in steps)
                for phase, steps in phases.items()
                for step in steps
            ),
            default=0,
        )

    @property
    def memory_bytes(self) -> int:
        """Memory of the model and of all that is made of it, at its most."""
        return self.model_bytes + self.originals_bytes + self.working_bytes

    @property
    def streamed_bytes(self) -> int:
        """Memory with the blocks' weights on disk, of which two blocks are in memory at a time, at least."""
        working = self._working_bytes(self.drawn_bytes)
        return working + min(self.model_bytes, self.outside_bytes + 2 * self.block_bytes)

    @property
    def block_forwards(self) -> int:
        """Runs of a block on one sequence; fewer if the top-up abandons candidates early."""
        return sum(step.block_forwards for step in self.steps)

    @property
    def seconds(self) -> float:
        """Time of all steps."""
        return sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all values with the totals, JSON-serialisable."""
        totals = ("working_bytes", "memory_bytes", "streamed_bytes", "block_forwards", "seconds")
        return {**asdict(self), **{name: getattr(self, name) for name in totals}}

    def __str__(self) -> str:
        """Return a table for the terminal."""
        return format_table(["", "plan"], [*_model_rows(self), *_memory_rows(self), *_work_rows(self)])


def plan_prune(
    model_or_path: str | Path,
    config: NeuronALConfig,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | None = None,
    batch_size: int | None = None,
) -> PrunePlan:
    """Return what [`NeuronALPruner.prune`] would do and cost. The model's weights are not read.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model; of its files only the config is read.
        config ([`NeuronALConfig`]): how to prune.
        dtype (`str` or `torch.dtype`): of the weights; `"auto"`: as the model's config says, or float32.
        revision (`str`, *optional*): branch, tag or commit of the model on the Hub.
        trust_remote_code (`bool`): whether to run code that comes with the model.
        device (`torch.device`, *optional*): where to measure. None: the accelerator, or the CPU.
        batch_size (`int`, *optional*): as for [`NeuronALPruner.prune`].

    Raises:
        `ValueError`, `TypeError`, `OSError`: as the prune itself, as far as they can be known without weights.
    """
    options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    context = check_unloaded(model_or_path, config, dtype, **options)
    decoder, model, config = context.decoder, context.model, context.config
    tokens = resolve_seq_length(model.config, context.config.seq_length)
    device = device or default_device()
    steps = rehearse(context, tokens, batch_size or default_batch_size(tokens), device)
    hidden = config.num_alignment_samples * tokens * decoder.config.hidden_size * model.dtype.itemsize
    projections = decoder.projections.values()
    return PrunePlan(
        config=config.to_dict(),
        model_type=decoder.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        seq_length=tokens,
        blocks=len(decoder.blocks),
        projections=len(projections),
        weights=sum(weight.numel() for weight in model.parameters()),
        pruned_weights=sum(projection.numel for projection in projections),
        zeros=sum(_zeros(config.sparsity or 0.0, projection.shape) for projection in projections),
        **_weight_bytes(context),
        alignment_bytes=2 * hidden,
        steps=tuple(steps),
        device=str(device),
    )


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@cache
def _zeros(sparsity: float, shape: tuple[int, int]) -> int:
    return int(row_counts(sparsity, shape).sum())


def _weight_bytes(context: PruneContext) -> dict[str, Any]:
    """Return the fields of the plan about the model's own weights, tied ones once unless a rotation unties them."""
    model, decoder, rotation = context.model, context.decoder, context.methods.rotation
    saved = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    parts = None if rotation is None else find_rotated(decoder, rotation.untie)
    untied = parts.untied_bytes if parts else 0
    blocks = [sum(_size(weight) for weight in block.module.parameters()) for block in decoder.blocks]
    saved_bytes = sum(_size(tensor) for tensor in saved.values()) + untied
    in_memory = model.get_memory_footprint() + untied  # with the buffers that are not saved
    packed = expected_size(context, bool(untied))
    return {
        "saved_bytes": saved_bytes,
        "packed_saved_bytes": saved_bytes - packed.dense + packed.saved,
        "bits_per_weight": expected_size(context, False, head=False).bits_per_weight,
        "model_bytes": in_memory,
        "packed_model_bytes": in_memory - packed.dense + packed.in_memory,
        "block_bytes": max(blocks),
        "originals_bytes": sum(map(_size, parts.parameters())) if parts else 0,
        **(drawn_bytes(parts, rotation) if parts and rotation else {"drawn_bytes": 0, "copied_bytes": 0}),
        "outside_bytes": in_memory - sum(blocks),
    }


def _model_rows(plan: PrunePlan) -> list[list[str]]:
    config = plan.config
    rotated = "rotated, " if config["rotate"] else ""
    refit = f", {config['refit_epochs']} epochs of refit" if config["refit_epochs"] else ""
    projections = f"{plan.projections:,} projections in {plan.blocks} blocks"
    weights = f"{projections}, {format_count(plan.pruned_weights)} weights"
    rows = [["model", f"{plan.model_type}, {format_count(plan.weights)} weights in {plan.dtype}"]]
    if config["sparsity"] is None:
        rows.append(["method", method_text(config)])
        rows.append(["quantised", f"{weights}; {plan.bits_per_weight:.3f} bits a weight"])
    else:
        rows.append(["method", f"{rotated}{method_text(config)}{refit}, sparsity {config['sparsity']:.2%}"])
        rows.append(["pruned", weights])
        rows.append(
            ["become zero", f"{format_count(plan.zeros)} weights, {plan.zeros / plan.weights:.2%} of the model's"]
        )
    return [
        *rows,
        ["saved model", f"{format_bytes(plan.saved_bytes)}, packed {format_bytes(plan.packed_saved_bytes)}"],
    ]


def _memory_rows(plan: PrunePlan) -> list[list[str]]:
    on_disk = f"about {format_bytes(plan.streamed_bytes)} (--stream)"
    return [
        ["memory", f"about {format_bytes(plan.memory_bytes)}, of which"],
        ["- model", f"{format_bytes(plan.model_bytes)} (largest block {format_bytes(plan.block_bytes)})"],
        *([["- weights before the rotation", format_bytes(plan.originals_bytes)]] if plan.originals_bytes else []),
        ["- hidden states", format_bytes(max((step.hidden_bytes for step in plan.steps), default=0))],
        ["- masks, weights and codes kept", format_bytes(max((step.kept_bytes for step in plan.steps), default=0))],
        ["- for a moment", format_bytes(max((step.moment_bytes for step in plan.steps), default=0))],
        ["to run it", f"{format_bytes(plan.model_bytes)}, packed {format_bytes(plan.packed_model_bytes)}"],
        *([["memory, blocks on disk", on_disk]] if plan.config["sparsity"] is not None else []),
    ]


def _work_rows(plan: PrunePlan) -> list[list[str]]:
    if not plan.block_forwards:
        return [["passes over the blocks", "none: no calibration data is needed"]]
    config = plan.config
    samples = f"{config['num_samples']} x {plan.seq_length} tokens"
    rows = [
        ["calibration", f"{samples}, the first {config['num_alignment_samples']} for the top-up"],
        ["steps", f"{len(plan.steps)}, {format_count(plan.block_forwards)} block forwards"],
    ]
    for step in plan.steps:
        plans = f", {step.plans} plan{'s' if step.plans > 1 else ''}" if step.plans else ""
        forwards = f"{format_count(step.block_forwards)} block forwards"
        rows.append([f"- {step.label.lower()}", f"{format_duration(step.seconds)}, {forwards}{plans}"])
    rows.append(["time", f"about {format_duration(plan.seconds)} on {plan.device}, by measuring a few blocks"])
    rows.append(["", "not counted: reading, saving; candidates that are abandoned early save some"])
    return rows
