"""The seam to transformers: what its from_pretrained calls, and all of its internals that are used."""
