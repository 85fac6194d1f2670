"""Top-ups: where the sparsity goes, on top of any saliency.

A method is one file with a class that is registered by a decorator, found without another edit; its hyper-parameters are
the fields of its dataclass. It asks the engine's sweep and answers with a plan. A prune calls it once, between the checks
and the final pruning; the config names it. Files without such a class hold what several methods share.
"""

from .base import TOPUPS, Allocation, TopUp, register_topup
from .spreading import get_dist


__all__ = ["TOPUPS", "Allocation", "TopUp", "get_dist", "register_topup"]
