"""The seam to transformers: what its `from_pretrained` calls, and all of its internals that are used.

`registration` is imported with the package itself and imports nothing; the rest is imported by transformers' own import,
or when a model is loaded. Every room may use `internals`, which knows nothing of the package, so that a release of
transformers breaks one file; no room may use the others.
"""
