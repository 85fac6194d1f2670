"""A sparse model's files: dense or packed, with report and card; written whole or not at all, read with suspicion."""
