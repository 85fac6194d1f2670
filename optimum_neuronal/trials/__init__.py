"""Measures what candidate plans would do to a model, without changing a weight.

Top-ups ask a [`PlanEvaluator`] for a [`Measurement`] of plans, which knows neither the top-up nor the config.
"""

from .plan_evaluator import Cache, Measurement, PlanEvaluator


__all__ = ["Cache", "Measurement", "PlanEvaluator"]
