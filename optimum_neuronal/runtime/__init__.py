"""Processes, records, memory, folders, registries: what the other rooms stand on; knows nothing about models."""
