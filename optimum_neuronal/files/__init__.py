"""Atomic writes, locks, work directories and records of unfinished work.

This room imports no other room but `system` and the modules of the root.
"""
