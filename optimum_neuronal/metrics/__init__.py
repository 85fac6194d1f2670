"""Numbers that compare a sparse model with its dense one, from what their projections receive and put out."""
