"""A cache for measurements: hidden states, dense activations, scores, the stream of a plan."""

from collections.abc import Callable, Hashable
from typing import Any


class Cache:
    """Values that are computed once. A `lasting` cache is shared by several prunes of one model."""

    def __init__(self, lasting: bool = False):
        self._lasting = lasting
        self._found: dict[Hashable, Any] = {}
        self._latest: tuple[Any, Any] = (None, None)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    def latest(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of an object. Only the latest is kept."""
        if self._latest[0] is not key:
            self._latest = key, make()
        return self._latest[1]

    def release(self) -> None:
        """Drop the latest value, and all others unless the cache is lasting."""
        self._latest = None, None
        if not self._lasting:
            self._found.clear()
