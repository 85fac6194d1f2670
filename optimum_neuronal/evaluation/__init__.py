"""Evaluation of dense and sparse models: perplexity, zero-shot tasks, speed and memory.

It does not know how commands are spelt or how a sparse model is trained. lm-eval, torchao and matplotlib are imported
where they are needed.
"""
