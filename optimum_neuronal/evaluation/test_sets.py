"""Names of test sets in tables, reports and model cards."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..pruning.reporting import without_folders


def name_test_sets(evaluate: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> test set, in their order.

    A file is called by its name without its folder, data in memory `"test 1"` by its place. A second test set of the
    same name is called `"NAME (2)"`.

    Args:
        evaluate (`Iterable` or `Mapping`): test sets, each as for [`evaluate_perplexity`]; or name -> test set.

    Raises:
        `TypeError`: a text, or an object that is not iterable.
    """
    if isinstance(evaluate, Mapping):
        return dict(evaluate)
    if isinstance(evaluate, (str, os.PathLike)) or not isinstance(evaluate, Iterable):
        raise TypeError(f"evaluate is {evaluate!r}: expected a list of test sets, such as ['wikitext2'].")
    named: dict[str, Any] = {}
    for number, entry in enumerate(evaluate, start=1):
        is_name = isinstance(entry, (str, os.PathLike))
        first = name = without_folders(os.fspath(entry)) if is_name else f"test {number}"
        copies = 1
        while name in named:
            copies += 1
            name = f"{first} ({copies})"
        named[name] = entry
    return named
