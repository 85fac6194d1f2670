"""Packed matrices: bitmasks, kept values, codes and steps; how they are encoded, decoded and checked.

Checkpoints and inference call this room. It imports `sparsity` and `native`; models and files are unknown here.
"""
