"""The commands of `optimum-cli neuronal`: flags, and what is printed.

`optimum-cli` imports this at every start, so its modules import nothing heavy: what a command needs is imported when it
runs. A command parses, calls what Python's users call too, and prints; nothing else of the package prints or exits.
"""
