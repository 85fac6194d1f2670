"""Saliency methods, which see a projection's weight and statistics of its inputs. One file with one dataclass each."""

from .base import SALIENCIES, Inputs, Saliency, WeightUpdate, register_saliency


__all__ = ["SALIENCIES", "Inputs", "Saliency", "WeightUpdate", "register_saliency"]
