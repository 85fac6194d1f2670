"""Measures how much of the processor other processes take, so that a benchmark can say that its figures are disturbed."""

import os
import time
from pathlib import Path


STAT = Path("/proc/stat")


class OtherLoad:
    """Cores that other processes took since it was made."""

    def __init__(self):
        self._start = self._now()

    def cores(self) -> float | None:
        """Cores taken on average; None except on Linux. Child processes count as other ones until they have ended."""
        if self._start is None:
            return None
        wall, busy, own = (now - before for now, before in zip(self._now(), self._start))
        return max(0.0, (busy - own) / wall)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds by the clock, of all processes on all cores, and of this process and its children."""
        if not STAT.exists():
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is in user's
        ticks = [int(word) for word in STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(os.times()[:4])
