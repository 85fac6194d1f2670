"""Whether packed checkpoints stay packed when they are loaded. Asked at every load, hence apart from what packs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


_keeping: ContextVar[str | None] = ContextVar("keeping packed", default=None)


@contextmanager
def keeping_packed(activations: str = "int8") -> Iterator[None]:
    """While the context lasts, packed checkpoints that this thread loads stay packed.

    transformers takes no argument for it: a `quantization_config` that is passed for a checkpoint with its own is refused.

    Args:
        activations (`str`): what inputs become that meet values of few bits: `"int8"` or `"bf16"`.
    """
    token = _keeping.set(activations)
    try:
        yield
    finally:
        _keeping.reset(token)


def keeps_packed() -> bool:
    """Whether the context lasts."""
    return _keeping.get() is not None


def kept_activations() -> str:
    """What the context says of inputs. Threads that read files are outside of it: ask before they begin."""
    return _keeping.get() or "int8"
