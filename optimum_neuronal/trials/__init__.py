"""Trials: measurements of what sparsity plans would do to a model, without changing a weight.

Top-ups ask a `Sweep` for scores of candidate plans. This room imports the engine and the saliencies. It does not know the
top-up that asks, nor the config of a prune.
"""
