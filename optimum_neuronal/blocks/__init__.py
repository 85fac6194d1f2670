"""Runs a model block by block over calibration sequences, captures inputs and replays blocks.

This room knows decoders and the statistics of their inputs. Plans and methods are unknown here.
"""
