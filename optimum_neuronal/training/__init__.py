"""Keeps the zeros of a sparse model while it is trained, or prunes it meanwhile."""
