"""NeuronAL: sparse language models without retraining, for transformers and optimum.

Names are imported when they are first used, so that `optimum-cli`, which looks at every plug-in, starts quickly. What
transformers has to know of this package it learns when it is imported itself.
"""

import importlib
from typing import TYPE_CHECKING

from .registration import register


__version__ = "0.1.0.dev0"

_HOME = {
    "NeuronALConfig": "config",
    "NeuronALPruner": "pruner",
    "PruningReport": "report",
    "evaluate_perplexity": "evaluation",
    "evaluate_tasks": "tasks",
    "compare": "comparing",
    "save_pretrained": "packed_saving",
    "inspect_checkpoint": "inspecting",
    "convert_checkpoint": "converting",
    "keep_sparsity": "keeping",
    "keep_lora_sparse": "lora",
    "SparsityCallback": "training",
    "NeuronALCallback": "training",
    "Architecture": "architectures",
    "register_architecture": "architectures",
    "register_saliency": "saliency",
    "register_topup": "topup",
}
__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from .architectures import Architecture, register_architecture
    from .comparing import compare
    from .config import NeuronALConfig
    from .converting import convert_checkpoint
    from .evaluation import evaluate_perplexity
    from .inspecting import inspect_checkpoint
    from .keeping import keep_sparsity
    from .lora import keep_lora_sparse
    from .packed_saving import save_pretrained
    from .pruner import NeuronALPruner
    from .report import PruningReport
    from .saliency import register_saliency
    from .tasks import evaluate_tasks
    from .topup import register_topup
    from .training import NeuronALCallback, SparsityCallback

register()


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return sorted(__all__)
