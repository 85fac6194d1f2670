"""What a model is made of: its blocks, their projections, what their rows feed, how their weights are called."""
