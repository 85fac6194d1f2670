"""Saliency methods, which see a projection's weight and statistics of its inputs. Each is a dataclass."""

from .base import SALIENCIES, Inputs, Saliency, WeightUpdate, register_saliency


__all__ = ["SALIENCIES", "Inputs", "Saliency", "WeightUpdate", "register_saliency"]
