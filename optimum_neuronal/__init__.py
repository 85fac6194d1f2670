"""NeuronAL for Hugging Face: prune any decoder without retraining.

Public names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

_HOME = {
    "NeuronALConfig": "config.neuronal_config",
    "NeuronALPruner": "pruner",
    "PruningReport": "report",
    "compare_answers": "evaluation.answers",
    "evaluate_perplexity": "evaluation.perplexity",
    "evaluate_tasks": "evaluation.tasks",
    "compare": "comparing.compare",
    "save_pretrained": "checkpoint.saving",
    "inspect_checkpoint": "checkpoint.inspecting",
    "convert_checkpoint": "checkpoint.converting",
    "sparsify": "packed.sparsify",
    "densify": "packed.sparsify",
    "keep_sparsity": "training.keeping",
    "keep_lora_sparse": "training.lora",
    "lora_for_packed": "training.lora",
    "sample_text": "data.sample_text",
    "FinetuneConfig": "training.finetune_config",
    "finetune": "training.finetune",
    "SparseTrainer": "training.sparse_trainer",
    "SparsityCallback": "training.keeping",
    "NeuronALCallback": "training.neuronal_callback",
    "Architecture": "model.architectures",
    "register_architecture": "model.architectures",
    "register_saliency": "saliency",
    "register_topup": "topup",
}
__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from .checkpoint.converting import convert_checkpoint
    from .checkpoint.inspecting import inspect_checkpoint
    from .checkpoint.saving import save_pretrained
    from .comparing.compare import compare
    from .config.neuronal_config import NeuronALConfig
    from .data.sample_text import sample_text
    from .evaluation.answers import compare_answers
    from .evaluation.perplexity import evaluate_perplexity
    from .evaluation.tasks import evaluate_tasks
    from .model.architectures import Architecture, register_architecture
    from .packed.sparsify import densify, sparsify
    from .pruner import NeuronALPruner
    from .report import PruningReport
    from .saliency import register_saliency
    from .topup import register_topup
    from .training.finetune import finetune
    from .training.finetune_config import FinetuneConfig
    from .training.keeping import SparsityCallback, keep_sparsity
    from .training.lora import keep_lora_sparse, lora_for_packed
    from .training.neuronal_callback import NeuronALCallback
    from .training.sparse_trainer import SparseTrainer


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


# After this, `from_pretrained` loads packed checkpoints, and prunes with a `NeuronALConfig`.
importlib.import_module(".transformers_plugin", __name__).register()
