"""Tables and figures, checks of arguments, the registry, processes and memory: what every package may use."""
