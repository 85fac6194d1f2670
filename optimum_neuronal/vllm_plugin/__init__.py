"""vLLM computes with packed weights: of packed checkpoints, and of dense ones with zeros, packed as they arrive."""
