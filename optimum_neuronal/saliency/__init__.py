"""Saliency methods: how much each weight of a projection matters.

A method is one file with a class that is registered by a decorator, found without another edit; its hyper-parameters are
the fields of its dataclass. It sees one projection's weight and statistics of its inputs, never the model. The engine
calls it for trials and for the final pruning; the config names it.
"""

from .base import SALIENCIES, Saliency, register_saliency


__all__ = ["SALIENCIES", "Saliency", "register_saliency"]
