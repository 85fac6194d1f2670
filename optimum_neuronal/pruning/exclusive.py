"""One thread at a time works on a model's weights: the blocks of another would compute with trial weights."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


_in_use: set[nn.Parameter] = set()
_lock = threading.Lock()


@contextmanager
def alone_with(model: nn.Module) -> Iterator[None]:
    """While the context lasts, no other thread may enter it with this model, or with one that shares weights with it.

    Raises:
        `RuntimeError`: another thread has.
    """
    own = set(model.parameters()) if isinstance(model, nn.Module) else set()
    with _lock:
        if not own.isdisjoint(_in_use):
            raise RuntimeError("Another thread is pruning this model: wait until it has finished, or prune a copy.")
        _in_use.update(own)
    try:
        yield
    finally:
        with _lock:
            _in_use.difference_update(own)
