"""Runs a model block by block over calibration sequences, captures inputs and replays blocks."""
