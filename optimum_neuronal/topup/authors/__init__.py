"""Variants of top-ups that repeat what the code of NeuronAL's authors does. They also ran the paper's baselines with it."""
