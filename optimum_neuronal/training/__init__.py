"""Keeps the zeros of a sparse model while it is trained, or prunes a dense one meanwhile.

A training loop calls it, transformers' Trainer by the callbacks, PEFT by the layers that are guarded. It may prune
and read what a checkpoint records; nothing that prunes, evaluates or saves may depend on it. peft is imported only
where adapters are found.
"""
