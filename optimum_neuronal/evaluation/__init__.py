"""What a model loses: perplexity, zero-shot tasks, methods compared, figures of it."""
