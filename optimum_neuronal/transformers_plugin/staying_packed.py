"""Whether packed checkpoints stay packed when they are loaded. Asked at every load, hence apart from what packs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


_keeping: ContextVar[bool] = ContextVar("keeping packed", default=False)


@contextmanager
def keeping_packed() -> Iterator[None]:
    """While the context lasts, packed checkpoints that this thread loads stay packed.

    transformers takes no argument for it: a `quantization_config` that is passed for a checkpoint with its own is refused.
    """
    token = _keeping.set(True)
    try:
        yield
    finally:
        _keeping.reset(token)


def keeps_packed() -> bool:
    """Whether the context lasts."""
    return _keeping.get()
