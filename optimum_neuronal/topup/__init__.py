"""Top-ups: methods that decide the sparsity of every projection or row, on top of any saliency.

A method is a registered dataclass, found without another edit. Its fields are its hyperparameters. A pruning
run calls it once, between the checks and the final pruning. The variant `authors` of a method, beside it, repeats what the
code of NeuronAL's authors does: they also ran the paper's baselines with it. Files without a registered class hold helpers.
"""

from .base import TOPUPS, Allocation, TopUp, register_topup
from .distribution import get_dist


__all__ = ["TOPUPS", "Allocation", "TopUp", "get_dist", "register_topup"]
