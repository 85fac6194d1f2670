"""Numbers that compare a sparse model with its dense one, from what their projections receive and put out.

The engine gathers the statistics while blocks run, saliencies and top-ups score by them. It may know what a projection
is; it may not run a block or decide what becomes sparse.
"""
