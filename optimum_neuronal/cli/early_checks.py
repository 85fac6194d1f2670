"""Checks of arguments that need nothing heavy: a mistyped name or path is an error within a second."""

import argparse
import os
import sys
from typing import Any

from ..common.registry import parse_method
from ..common.validation import did_you_mean
from ..data.documents import find_dataset
from .flags import methods


def check_arguments(args: argparse.Namespace) -> None:
    """Raise for names of methods and datasets and for paths, among a command's arguments, that cannot be right."""
    for kind in ("saliency", "topup"):
        known = methods(kind).split(", ")
        for text in _several(args, kind):
            name = parse_method(text)[0]
            if (
                name not in known and f"optimum_neuronal.{kind}" not in sys.modules
            ):  # a plug-in may have registered more
                raise ValueError(f"Unknown {kind} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    for name in (*_several(args, "dataset"), *_several(args, "evaluate")):
        find_dataset(name)
    for flag in ("config", "include_path"):
        path = getattr(args, flag, None)
        if path is not None and not os.path.exists(path):
            raise FileNotFoundError(f"--{flag.replace('_', '-')} {path} does not exist.")
    output = getattr(args, "output", None)
    if output is not None and os.path.exists(output) and not os.path.isdir(output):
        raise NotADirectoryError(f"--output {output} is a file: name a directory.")
    if getattr(args, "plots", False):
        from ..common.figure_style import check_matplotlib

        check_matplotlib()
    model = getattr(args, "model", None)
    if model is not None:
        _check_model(model)


def _several(args: argparse.Namespace, name: str) -> list[str]:
    value: Any = getattr(args, name, None)
    return [value] if isinstance(value, str) else list(value or ())


def _check_model(name: str) -> None:
    """Raise for a directory without a model, or a path that is not there. Ask nothing of the Hub."""
    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise FileNotFoundError(f"There is no config.json in {name}: name the directory of a model.")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        folder = os.path.dirname(name) or "."
        hint = did_you_mean(os.path.basename(name), os.listdir(folder) if os.path.isdir(folder) else ())
        raise FileNotFoundError(f"The directory {name} does not exist.{hint}")
