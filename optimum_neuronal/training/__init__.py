"""Keeps the zeros of a sparse model during training, or prunes a dense model during training."""
