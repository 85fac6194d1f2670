"""Measures what candidate plans would do to a model, without changing a weight.

Top-ups ask a [`PlanEvaluator`] for a [`Measurement`] of plans. Each measurement is a file of its own. None of them knows the
top-up or the config.
"""

from .plan_evaluator import Cache, Measurement, PlanEvaluator


__all__ = ["Cache", "Measurement", "PlanEvaluator"]
