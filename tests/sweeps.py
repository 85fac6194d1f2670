"""A sweep from its parts, for tests and benchmarks that ask it directly."""

from optimum_neuronal.engine.applier import PlanApplier
from optimum_neuronal.engine.engine import Engine
from optimum_neuronal.engine.records import StepRecords
from optimum_neuronal.engine.runner import BlockRunner
from optimum_neuronal.engine.sweep import Sweep


def build_sweep(decoder, saliency, ids, num_alignment_samples, batch_size=1, device="cpu", **options) -> Sweep:
    """Options: `pattern` and `min_expert_tokens` of the applier, `journal` and `processes` of the records."""
    applied = {name: options[name] for name in ("pattern", "min_expert_tokens") if name in options}
    recorded = {name: options[name] for name in ("journal", "processes") if name in options}
    runner = BlockRunner(decoder, batch_size, device, options.get("max_hidden_bytes"))
    return Sweep(Engine(runner, PlanApplier(saliency, **applied), ids, num_alignment_samples, StepRecords(**recorded)))
