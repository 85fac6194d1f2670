"""Packed weights: their formats, modules that compute with them, and kernels for accelerators."""
