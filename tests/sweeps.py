"""Sweeps from their parts, for tests and benchmarks that ask them directly, and what they must leave as it was."""

import hashlib
from pathlib import Path

import torch

from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.files.records import Records
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.saliency.plan import SparsityPlan
from optimum_neuronal.trials.applier import PlanApplier
from optimum_neuronal.trials.engine import Engine
from optimum_neuronal.trials.sweep import Sweep


def build_sweep(decoder, saliency, ids, num_alignment_samples, batch_size=4, device="cpu", **options) -> Sweep:
    """Options: `pattern` and `min_expert_tokens` of the applier, `records`, or the `processes` that they are for."""
    applied = {name: options[name] for name in ("pattern", "min_expert_tokens") if name in options}
    records = options.get("records") or Records(processes=options.get("processes"))
    runner = BlockRunner(decoder, batch_size, device, options.get("max_hidden_bytes"))
    return Sweep(Engine(runner, PlanApplier(saliency, **applied), ids, num_alignment_samples, records))


def make_sweep(model, ids, saliency="wanda", batch_size=4, **chosen) -> Sweep:
    """Over all projections of a model, or the chosen ones; trials are measured on the first four sequences."""
    return build_sweep(find_decoder(model, **chosen), SALIENCIES.get(saliency)(), ids, 4, batch_size)


def uniform(sweep, sparsity=0.5) -> SparsityPlan:
    return SparsityPlan(dict.fromkeys(sweep.decoder.projections, sparsity))


def state(model) -> dict[str, torch.Tensor]:
    """A copy of all that a model holds."""
    return {key: value.clone() for key, value in model.state_dict().items()}


def unchanged(model, before) -> bool:
    """Whether a model holds what it held before, and no hooks."""
    hooks = any(module._forward_pre_hooks or "forward" in module.__dict__ for module in model.modules())
    return not hooks and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def checksums(folder: Path) -> dict[str, str]:
    """The contents of a folder's files, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}
