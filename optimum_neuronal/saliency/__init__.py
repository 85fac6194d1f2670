"""Saliency methods: how much each weight matters. One file each, found by name."""

from .base import SALIENCIES, Saliency, register_saliency


__all__ = ["SALIENCIES", "Saliency", "register_saliency"]
