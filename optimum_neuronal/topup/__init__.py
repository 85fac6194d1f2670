"""Top-ups: where the sparsity goes. One file each, found by name."""

from .base import TOPUPS, Allocation, TopUp, get_dist, register_topup


__all__ = ["TOPUPS", "Allocation", "TopUp", "get_dist", "register_topup"]
