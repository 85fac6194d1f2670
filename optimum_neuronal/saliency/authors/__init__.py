"""Variants of saliencies that repeat what the code of NeuronAL's authors does."""
