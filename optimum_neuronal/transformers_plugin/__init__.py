"""The plug-in to transformers: the code that its `from_pretrained` calls.

`registration` is imported with the package itself and imports nothing. The rest is imported when transformers is, or
when a model is loaded.
"""
