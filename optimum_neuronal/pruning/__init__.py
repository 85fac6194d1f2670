"""One prune, from a config to what becomes of every weight.

The pruner, comparisons and training come here: for the checks that precede any work, calibration data, the search with
the final pruning behind it, the report of it all; the command line also for a dry run. It may know configs, methods and
the engine. It changes no weight: what was found is applied by those who asked.
"""
