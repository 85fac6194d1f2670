"""Plans, masks and packed weights: tensors alone, without a model."""
