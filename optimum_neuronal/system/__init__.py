"""Processes, memory, time, signals and numerical precision: what the machine offers.

This room imports no other room.
"""
