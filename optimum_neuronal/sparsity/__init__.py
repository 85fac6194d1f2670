"""Sparsity plans, masks and N:M patterns: how sparse each row is and which weights are kept.

Everything here is a pure function or a record of tensors. This room imports no other room.
"""
