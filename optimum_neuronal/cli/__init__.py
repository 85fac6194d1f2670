"""The commands of `optimum-cli neuronal`: flags, and what is printed.

`optimum-cli` imports this at every start, so no module here imports anything heavy: what a command needs is imported
when it runs.
"""
