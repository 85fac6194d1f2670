"""Packed weights, modules that compute with them, and kernels for accelerators."""
