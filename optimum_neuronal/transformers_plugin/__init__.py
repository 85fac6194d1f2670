"""The plug-in to transformers: the code that its `from_pretrained` calls."""


def register() -> None:
    """Register quantizers and configs with transformers. A second call changes nothing."""
    from . import packed_loading, pruning_at_load  # noqa: F401  (their decorators register)
