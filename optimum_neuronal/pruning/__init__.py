"""One pruning run of a model that is in memory.

`prepare.py` checks model, config and weights, draws the calibration data, and returns the context that every step receives.
`prune.py` is the way through: the top-up's plan, the blocks one by one (`refit.py`), the report; at the very end the weights
change. `dry_run.py` shows what pruning would do.
"""
