"""Compares many prunes of one model: one loop, its tables and figures. It imports everything that a prune needs."""
