"""Top-ups: where the sparsity goes. One file each, found by name."""

from .base import TOPUPS, Allocation, TopUp, register_topup
from .spreading import get_dist


__all__ = ["TOPUPS", "Allocation", "TopUp", "get_dist", "register_topup"]
