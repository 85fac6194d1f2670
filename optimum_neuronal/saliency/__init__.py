"""Saliency methods, which see a projection's weight and statistics of its inputs. One file with one dataclass each."""

from .base import SALIENCIES, Saliency, register_saliency


__all__ = ["SALIENCIES", "Saliency", "register_saliency"]
