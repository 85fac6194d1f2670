"""Compares many prunes of one model: one loop, its tables and figures."""
