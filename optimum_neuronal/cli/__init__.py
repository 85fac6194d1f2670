"""The commands of `optimum-cli neuronal`."""
