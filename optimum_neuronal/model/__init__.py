"""The parts of a model: its blocks, their projections, and the features that their rows feed.

Other rooms begin with `find_decoder`, and use no names of a family afterwards. This room may know transformers and the
changes of `sparsity`, but no calibration data, saliency, top-up or config of this package.
"""
