"""A clock for the phases of long work."""

import time


class Clock:
    """A clock for the phases of long work, one after the other; the first begins when the clock is made.

    Attributes:
        seconds (`dict[str, float]`): phase -> its seconds of wall time, for the phases that have ended.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase, and begin the next one."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
