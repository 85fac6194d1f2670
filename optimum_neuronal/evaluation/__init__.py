"""What a model loses: perplexity, zero-shot tasks, methods compared from one dense load, figures of it.

The command line, the demonstration and users call it, on dense and sparse models alike. It may prune, to compare
methods; it may not know how commands are spelt, or how a sparse model is trained. lm-eval and matplotlib are
imported only where they are needed.
"""
