"""Sparsity plans, masks and N:M patterns.

Everything here is a pure function or a record of tensors. This room imports no other room.
"""
