"""A sparse model's files: weights dense or packed, what was done to them, report and model card.

The pruner saves and publishes here, transformers' plug-in and the command line read, convert and inspect. A checkpoint is
written whole or not at all; of what is read nothing is believed before it was compared with what is there. It may know
decoders, reports and configs (for cards); it may not know how masks are found.
"""
