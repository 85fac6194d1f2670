"""Kernels in C for packed weights: their source, how they are compiled, and how they are loaded and chosen."""
