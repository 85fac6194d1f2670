"""PlanEvaluator for tests that ask them directly, and checks of what they must leave unchanged."""

import hashlib
from pathlib import Path

import torch
from forward import squared_norms

from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.blocks.statistics import activation
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.prune import prune_blocks
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import Plan, mask_rows, row_counts
from optimum_neuronal.topup import Allocation
from optimum_neuronal.trials import PlanEvaluator


def build_evaluator(
    decoder, saliency, ids, num_alignment_samples, batch_size=4, device="cpu", **options
) -> PlanEvaluator:
    """Options: `pattern`, `min_expert_tokens`, `max_hidden_bytes`, and `records` or the `processes` that they are for."""
    return PlanEvaluator(
        runner=BlockRunner(decoder, batch_size, device, options.pop("max_hidden_bytes", None)),
        saliency=saliency,
        ids=ids,
        num_alignment_samples=num_alignment_samples,
        records=options.pop("records", None) or Records(processes=options.pop("processes", None)),
        **options,
    )


def make_evaluator(model, ids, saliency="wanda", batch_size=4, **chosen) -> PlanEvaluator:
    """PlanEvaluator of all projections of a model, or the chosen ones, measured on the first four sequences."""
    return build_evaluator(find_decoder(model, **chosen), SALIENCIES.get(saliency)(), ids, 4, batch_size)


def changes_of(evaluator, plan, **options):
    """The changes of a plan by projection name."""
    return prune_blocks(evaluator, Allocation(plan), **options)[0]


def uniform(evaluator, sparsity=0.5) -> Plan:
    return Plan.uniform(evaluator.decoder.projections, sparsity)


def dense_masks(model, ids, evaluator, plan, projections=None) -> dict[str, torch.Tensor]:
    """The masks of a plan by name, from whole forwards of the model as it is."""
    projections = projections or evaluator.decoder.projections
    norms = squared_norms(model, ids, projections)
    return {
        name: mask_rows(
            evaluator.saliency.score(p.weight, activation(norms[name])), row_counts(plan.sparsity[name], p.shape)
        )
        for name, p in projections.items()
    }


def state(model) -> dict[str, torch.Tensor]:
    """A copy of all that a model holds."""
    return {key: value.clone() for key, value in model.state_dict().items()}


def same_state(model, before) -> bool:
    """Whether a model holds what it held before."""
    return all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def unchanged(model, before) -> bool:
    """Whether a model holds what it held before, and no hooks."""
    hooks = any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
    return not hooks and same_state(model, before)


def checksums(folder: Path) -> dict[str, str]:
    """The contents of a folder's files, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
