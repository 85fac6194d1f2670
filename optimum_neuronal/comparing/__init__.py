"""Compares many prunes of one model: the loop, tables and figures.

This room imports everything that one prune needs. The command line and the demonstration call it.
"""
