"""Keeps the zeros of a sparse model while it is trained, or prunes a dense one during training.

A training loop, transformers' Trainer (by the callbacks) and PEFT (by guarded layers) call this room. It may prune, and
read the record of a checkpoint; nothing that prunes, evaluates or saves may depend on it.
"""
