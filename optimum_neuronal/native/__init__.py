"""Kernels in C for packed weights: their source, how they are compiled, and how they are loaded and chosen.

It knows tensors by their addresses only, imports no other room, and everybody may call it. Where no kernel can be had,
callers compute in another way.
"""
