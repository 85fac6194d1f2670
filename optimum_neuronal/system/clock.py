"""Seconds by phase."""

import time


class Clock:
    """Times the phases of a long work, one after the other; the first begins when the clock is made.

    Attributes:
        seconds (`dict[str, float]`): phase -> seconds of wall time it took, for the phases that have ended.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Ends a phase, and begins the next one."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
