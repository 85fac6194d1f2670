"""What a decoder consists of: blocks, projections, experts, and the features that rows feed."""
