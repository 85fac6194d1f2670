"""Plans, masks, patterns and packed weights: how sparse, where the zeros are, and how few bytes that takes.

Methods ask it for masks, the engine for changes to try, pruning and checkpoints keep its packed weights. Everything
here is a pure function or a record of tensors: it may not know modules, models, files or calibration data, and imports
no other room.
"""
