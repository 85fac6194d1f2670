"""A dry run's plan as a table for the terminal."""

from typing import TYPE_CHECKING

from ..display import format_bytes, format_count, format_duration, format_table


if TYPE_CHECKING:
    from .dry_run import PrunePlan

Rows = list[list[str]]


def plan_table(plan: "PrunePlan") -> str:
    """All that a plan tells."""
    return format_table(["", "plan"], [*_model_rows(plan), *_memory_rows(plan), *_work_rows(plan)])


def _model_rows(plan: "PrunePlan") -> Rows:
    config = plan.config
    refit = f", {config['refit_epochs']} epochs of refit" if config["refit_epochs"] else ""
    projections = f"{plan.projections:,} projections in {plan.blocks} blocks"
    return [
        ["model", f"{plan.model_type}, {format_count(plan.weights)} weights in {plan.dtype}"],
        ["method", f"{config['saliency']} + {config['topup']}{refit}, sparsity {config['sparsity']:.2%}"],
        *([["bits", _bits(plan)]] if len(plan.pairs) > 1 else []),
        ["pruned", f"{projections}, {format_count(plan.pruned_weights)} weights"],
        ["become zero", f"{format_count(plan.zeros)} weights, {plan.zeros / plan.weights:.2%} of the model's"],
        ["saved model", f"{format_bytes(plan.saved_bytes)}, packed {format_bytes(plan.packed_saved_bytes)}"],
    ]


def _bits(plan: "PrunePlan") -> str:
    tried = ", ".join(f"{pair.value_bits} at {pair.sparsity:.2%}" for pair in plan.pairs)
    return (
        f"of values, with sparsity: {tried}; what loses least is chosen, {plan.config['value_bits']} are told of here"
    )


def _memory_rows(plan: "PrunePlan") -> Rows:
    solving = plan.solving
    parts = {"solving": solving.solver_bytes, "levels": solving.levels_bytes, "kept weights": solving.waiting_bytes}
    return [
        ["memory", f"about {format_bytes(plan.memory_bytes)}, of which"],
        ["- model", f"{format_bytes(plan.model_bytes)} (largest block {format_bytes(plan.block_bytes)})"],
        ["- trial weights", format_bytes(plan.trial_bytes)],
        ["- hidden states", format_bytes(plan.hidden_bytes)],
        ["- masks", format_bytes(plan.mask_bytes)],
        ["- for a moment", format_bytes(plan.working_bytes)],
        *([f"- {name}", format_bytes(size)] for name, size in parts.items() if size),
        ["to run it", f"{format_bytes(plan.model_bytes)}, packed {format_bytes(plan.packed_model_bytes)} (sparsify)"],
        ["memory, blocks on disk", f"about {format_bytes(plan.streamed_bytes)} (--stream)"],
    ]


def _work_rows(plan: "PrunePlan") -> Rows:
    if not plan.sweeps:
        return [["passes over the blocks", "none: no calibration data is needed"]]
    config, solving = plan.config, plan.solving
    samples = f"{config['num_samples']} x {plan.seq_length} tokens"
    rows = [
        ["calibration", f"{samples}, the first {config['num_alignment_samples']} for the top-up"],
        ["passes over the blocks", f"{len(plan.sweeps)}, {format_count(plan.block_forwards)} block forwards"],
    ]
    for label in dict.fromkeys(sweep.label for sweep in plan.sweeps):
        alike = [sweep for sweep in plan.sweeps if sweep.label == label]
        count = sum(sweep.plans for sweep in alike)
        plans = f", {count} plan{'s' if count > 1 else ''}" if count else ""
        forwards = format_count(sum(sweep.block_forwards for sweep in alike))
        rows.append([f"- {label.lower()}", f"{forwards} block forwards{plans}"])
    if solving.operations:
        times = f"at {solving.sparsities} sparsities" if solving.sparsities > 1 else "once"
        rate = f"{solving.operations:.2e} operations at {plan.rates.solved:.2e} per second"
        rows.append(["weights solved", f"{times}: {rate}, in float32"])
    if plan.choosing_seconds:
        rows.append(["masks and logits", f"{format_duration(plan.choosing_seconds)} to make and to compare them"])
    if plan.rounding_seconds:
        rows.append(["values rounded", f"{format_duration(plan.rounding_seconds)} to {config['value_bits']} bits"])
    rate = f"{plan.operations:.2e} operations at the {plan.rates.products:.2e} per second measured"
    rows.append(["time", f"about {format_duration(plan.seconds)}: {rate} on {plan.device}"])
    rows.append(["", "not counted: reading, saving; candidates that are abandoned early save some"])
    return rows
