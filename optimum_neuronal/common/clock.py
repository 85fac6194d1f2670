"""A clock for the phases of long work."""

import time


class Clock:
    """Wall time of consecutive phases."""

    def __init__(self):
        self.seconds: dict[str, float] = {}  # phase that has ended -> its seconds
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase, and begin the next one."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
