"""Computing with packed weights: layers that hold a bitmask and the kept values, and kernels that multiply with them.

A sparse model in this form takes fewer bytes and, where bandwidth bounds it, less time for a token. It may know packed
weights, decoders and checkpoints; it may not know how a model was pruned, or who runs it.
"""
