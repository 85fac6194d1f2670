"""Rotations of the residual stream and of attention heads, learned and merged into the weights before pruning.

They exist for decoders with RMS norms whose weights are in memory.
"""
