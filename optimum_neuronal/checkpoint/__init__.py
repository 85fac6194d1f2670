"""A sparse model's files: weights, dense or packed, report and model card."""
