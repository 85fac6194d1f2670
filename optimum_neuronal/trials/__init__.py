"""Trials: measurements of what plans would do to a model, without changing a weight.

Top-ups ask [`Trials`] for scores of candidate plans. It knows neither the top-up nor the config of the prune.
"""

from .trials import Cache, Trials


__all__ = ["Cache", "Trials"]
