"""Formats of packed weights, one file per format."""
