"""The demonstration, and the small trained model and texts that come with the package.

`optimum-cli neuronal demo` runs it; tests and benchmarks load its model. It uses the package as a user would, by its
pruner and its evaluation, and may not reach behind them; nothing but the command line depends on it.
"""
