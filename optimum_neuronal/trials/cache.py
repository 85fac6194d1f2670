"""Measurements that are asked for again: hidden states, dense activations, scores, the stream of a plan."""

from collections.abc import Callable, Hashable
from typing import Any


class Cache:
    """Values that are made once.

    Args:
        lasting (`bool`): True if prunes of the same model and sequences share it, so that it is not cleared between them.
    """

    def __init__(self, lasting: bool = False):
        self._lasting = lasting
        self._found: dict[Hashable, Any] = {}
        self._latest: tuple[Any, Any] = (None, None)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key, made once."""
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def latest(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of an object, made anew unless the last call was for this object."""
        if self._latest[0] is not key:
            self._latest = key, make()
        return self._latest[1]

    def release(self) -> None:
        """Drop the latest value, and all others unless they are shared."""
        self._latest = None, None
        if not self._lasting:
            self._found.clear()
