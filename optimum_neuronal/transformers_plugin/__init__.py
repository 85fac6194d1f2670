"""The plug-in to transformers: the code that its `from_pretrained` calls."""


def register() -> None:
    """Register the quantizer and its config with transformers. A second call changes nothing."""
    from . import hf_quantizer  # noqa: F401  (its decorators register)
