"""Processes, records, memory, folders, registries, checks and choices: what every other room stands on.

Any room calls it: to share work, to write what survives a crash, to find a method by its name, to check what a user
gave, to draw a table. It may not know what a model, a plan or a dataset is, and imports no other room.
"""
