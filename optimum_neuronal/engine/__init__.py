"""Runs a model block by block over calibration sequences, and measures what plans would do to it."""
