"""Runs a model block by block over calibration sequences, and measures what plans would do to it.

Top-ups ask it how good their plans are, the final pruning for what every projection receives. It may know decoders,
saliencies, metrics and journals; it may not know which top-up asks, the config of a prune, or what is done with its
results. What is tried on a block is taken back before the next one.
"""
