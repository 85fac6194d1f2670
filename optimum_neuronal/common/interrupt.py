"""Ctrl-C while weights change."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the context, in which weights change, ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = signal.signal(signal.SIGINT, lambda *_: received.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
    if received:
        raise KeyboardInterrupt
