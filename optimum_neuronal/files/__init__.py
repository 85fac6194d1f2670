"""Atomic writes, work directories, and records of unfinished work."""
