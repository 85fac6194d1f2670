"""Measures models: perplexity, zero-shot accuracy, and speed with dense and packed weights."""
