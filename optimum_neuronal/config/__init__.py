"""The config of a prune: its fields, its methods and its presets."""
