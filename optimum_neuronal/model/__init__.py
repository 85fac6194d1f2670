"""What a model is made of: its blocks, their projections, what their rows feed, and where the weights live.

Whatever takes a model apart begins with `find_decoder` here, and sees no family's own names afterwards. It may know
transformers and accelerate, and the plain changes of `sparsity`; it may not know calibration data, saliencies,
top-ups or a config of this package.
"""
