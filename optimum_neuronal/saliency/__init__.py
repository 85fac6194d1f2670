"""Saliency methods: how much each weight of a projection matters.

A method is one file with a registered dataclass, whose fields are its hyperparameters. It sees a projection's weight and
statistics of its inputs, never the model.
"""

from .base import SALIENCIES, Saliency, register_saliency


__all__ = ["SALIENCIES", "Saliency", "register_saliency"]
