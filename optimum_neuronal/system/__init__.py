"""Processes, devices, numerical precision, memory and notes to users.

This room imports no other room.
"""
