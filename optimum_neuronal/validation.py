"""Checks of arguments and hyper-parameters."""

import math
import os
from collections.abc import Iterable
from numbers import Integral
from typing import Any


def check_path(name: str, value: Any) -> str:
    """Return the text of a path; raise `TypeError` if it is neither text nor a path, `ValueError` if it is empty."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a path, as text or pathlib.Path.")
    if not value:
        raise ValueError(f"{name} is empty: expected a path, such as '.' for this folder.")
    return value


def check_several(name: str, value: Any, example: str) -> list:
    """Return the entries of a list, tuple, array or iterator; raise `TypeError` for anything else, also for one text.

    Args:
        name (`str`): of the argument, for the message.
        value: what came.
        example (`str`): of what is expected, for the message.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes, dict, type)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {_shown(value)}: expected several, such as {example}.")
    return list(value)


def check_texts(name: str, value: Any, example: str) -> list[str]:
    """Return the entries, see [`check_several`]; raise `TypeError` if one is not text."""
    entries = check_several(name, value, example)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"{name} holds {_shown(entry)}: expected text, such as {example}.")
    return entries


def check_count(name: str, value: Any, least: int) -> None:
    """Raise `TypeError` unless a value is a whole number, `ValueError` unless it is at least `least`."""
    message = f"{name} is {_shown(value)}: expected a whole number of at least {least}."
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)


def check_whole(name: str, value: int, least: int) -> None:
    """Raise `ValueError` unless a hyper-parameter is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: expected a whole number of at least {least}.")


def check_number(name: str, value: float, least: float, most: float = math.inf, above: bool = False) -> None:
    """Raise `ValueError` unless a hyper-parameter is a finite number from `least`, or `above` it, to `most`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and math.isfinite(value) and least <= value <= most and not (above and value == least):
        return
    if above:
        bounds = f"above {least:g}" + ("" if most == math.inf else f", at most {most:g}")
    else:
        bounds = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    raise ValueError(f"{name} is {value!r}: expected a number {bounds}.")


def _shown(value: Any) -> str:
    """Return a value for an error's message: itself if it is short, else its type."""
    shown = repr(value)
    return shown if len(shown) <= 60 and "\n" not in shown else f"a {type(value).__name__}"
