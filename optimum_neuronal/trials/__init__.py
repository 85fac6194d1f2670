"""Trials: measurements of what plans would do to a model, without changing a weight.

Top-ups ask [`Trials`] a [`Question`] about candidate plans; each question is a file of its own. Trials know neither the
top-up nor the config of the prune.
"""

from .trials import Cache, Question, Trials


__all__ = ["Cache", "Question", "Trials"]
