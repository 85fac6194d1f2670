"""Numbers as people read them: counts, bytes, durations."""

from collections.abc import Sequence


COUNTS = ((1e12, " trillion"), (1e9, " billion"), (1e6, " million"))
BYTES = ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))
DURATIONS = ((3600, " hours"), (60, " minutes"))


def format_count(value: int) -> str:
    """`1_234_567` -> `"1.23 million"`; below a million `"12,345"`."""
    return _in_units(value, COUNTS, 2) or f"{value:,}"


def format_bytes(value: int) -> str:
    """`1_234_567` -> `"1.23 MB"`; below a thousand `"12 bytes"`."""
    return _in_units(value, BYTES, 2) or f"{value} bytes"


def format_duration(seconds: float) -> str:
    """`90` -> `"1.5 minutes"`; below a minute `"12 seconds"`."""
    return _in_units(seconds, DURATIONS, 1) or f"{seconds:.2g} seconds"


def _in_units(value: float, units: Sequence[tuple[float, str]], digits: int) -> str | None:
    """In the first unit, from the largest, of which there is at least one."""
    return next((f"{value / unit:.{digits}f}{name}" for unit, name in units if value >= unit), None)
