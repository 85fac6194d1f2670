"""A sparse model's files: weights, dense or packed, report and model card.

A checkpoint is written whole or not at all. What its files say is checked before it is used.
"""
