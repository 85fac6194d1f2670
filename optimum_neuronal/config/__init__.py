"""The config of a pruning run: its fields, its methods and its presets."""
