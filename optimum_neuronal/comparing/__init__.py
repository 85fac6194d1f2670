"""Compares many ways to prune one model: one loop, its tables and figures."""
