"""Names of the lm-evaluation-harness's tasks, read off its YAML files in a second; its own index takes half a minute."""

import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..common.validation import did_you_mean


GROUPS = {"paper": ("rte", "winogrande", "boolq", "hellaswag", "arc_easy", "arc_challenge", "openbookqa")}

# A key at the start of a line, and its value: one name; or several, in brackets or in the lines below.
KEY = re.compile(rb"""^["']?(task|group|tag)["']?[ \t]*:[ \t]*(.*(?:\n[ \t]*- .*)*)""", re.M)
COMMENT = re.compile(rb"(?:^|[ \t])#.*")
ONE_NAME = re.compile(rb"""["']?([^\s,\[\]"'{}]+)["']?\s*""")
SUFFIXES = ("", ".yaml", ".yml")  # templates, which hold tags, mostly have none


def check_task_names(names: Sequence[str], include_path: str | Path | None = None) -> None:
    """Raise `ValueError` for a name that no file of a task, group or tag holds, with the closest one.

    Args:
        names (`Sequence[str]`): of the harness's tasks, groups and tags, and of `GROUPS`.
        include_path (`str` or `Path`, *optional*): a folder of further tasks.

    Raises:
        `ImportError`: the harness is not installed.
    """
    stock = stock_names()
    unknown = [name for name in names if name not in stock and name not in GROUPS]
    if not unknown:
        return
    texts = [] if include_path is None else list(map(_read, _files(include_path)))
    for name in unknown:
        word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
        if not any(map(word.search, texts)):  # YAML of the user's may be written in any way
            raise unknown_task(name, [*(find_names(include_path) if texts else ()), *stock])


def unknown_task(name: str, known: Sequence[str]) -> ValueError:
    """Return the error for an unknown task."""
    return ValueError(f"Unknown task {name!r}.{did_you_mean(name, [*GROUPS, *known])} `lm-eval ls tasks` lists all.")


def stock_folder() -> Path:
    """Return the folder of the harness's own tasks. Raise `ImportError` if it is not installed."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise missing_harness("No module named 'lm_eval'")
    return Path(found.submodule_search_locations[0], "tasks")


@functools.cache
def stock_names() -> dict[str, str | None]:
    """Return what [`find_names`] finds in the harness, read once."""
    return find_names(stock_folder())


def missing_harness(reason: object) -> ImportError:
    """Return the error for a harness that is not installed, or not with all that it needs."""
    return ImportError(f"Zero-shot tasks need lm-eval ({reason}): pip install optimum-neuronal[eval]")


def find_names(folder: str | Path) -> dict[str, str | None]:
    """Return the name of each task in a folder -> the path of its file; of each group and tag -> None."""
    found: dict[str, str | None] = {}
    for path in _files(folder):
        values = [(key, COMMENT.sub(b"", value).strip()) for key, value in KEY.findall(_read(path))]
        is_task = path.endswith(".yaml") and not any(key == b"group" for key, _ in values)
        for key, value in values:
            one = ONE_NAME.fullmatch(value)
            if key == b"tag" and not one:
                names = [name for part in re.split(rb"[,\n]", value) if (name := part.strip(b" \t\r[]-\"'"))]
            else:
                names = [one[1]] if one else []  # a group lists its members as tasks
            for name in names:
                found.setdefault(name.decode("utf-8", "replace"), path if key == b"task" and is_task else None)
    return found


def _files(folder: str | Path) -> list[str]:
    """Return the paths of the YAML files in a folder and its folders, in the harness's order."""
    walked = os.walk(folder)
    return sorted(
        f"{parent}{os.sep}{name}" for parent, _, names in walked for name in names if _suffix(name) in SUFFIXES
    )


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1]


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
