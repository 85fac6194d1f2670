"""The commands of `optimum-cli neuronal`: flags, and what is printed."""
