"""The flags of the config's fields, derived from `config_fields`. Imports nothing heavy, see `command`."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from ..config_fields import ConfigFields, kind_of
from .parser import share


@cache
def methods(room: str) -> str:
    """Names of the methods that come with the package, read off their files, so that none need be imported.

    Args:
        room (`str`): the folder that they lie in: `"saliency"` or `"topup"`.

    Returns:
        `str`: the names in order, with commas.
    """
    files = (Path(__file__).parents[1] / room).glob("*.py")
    found = (re.findall(r'^@register_\w+\("(\w+)"\)', file.read_text(encoding="utf-8"), re.M) for file in files)
    return ", ".join(sorted(name for names in found for name in names))


CONFIG_FLAGS = {entry.name: entry for entry in fields(ConfigFields) if entry.metadata.get("flag", True)}
READ_BY = {"sparsity": share}  # field -> function that checks more than its type


def add_config_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Add a flag for every field of the config but some. A flag that is not given is left to the config."""
    for name, entry in CONFIG_FLAGS.items():
        if name in without:
            continue
        kind, meaning, unset = kind_of(entry), entry.metadata["help"], entry.metadata.get("unset", entry.default)
        options = {"type": get_args(kind)[0], "nargs": "+"} if get_args(kind) else {"type": READ_BY.get(name, kind)}
        if "metavar" in entry.metadata:
            options["metavar"] = entry.metadata["metavar"]
        if "room" in entry.metadata:
            example = entry.metadata["example"]
            meaning += f": {methods(entry.metadata['room'])}; with hyper-parameters: {example}"
        shown = unset if str(unset).startswith("required") else f"default: {unset}"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"{meaning} ({shown})", **options)


def add_recipe_flag(parser: argparse.ArgumentParser) -> None:
    """Fields of the config from a file."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a recipe, which flags override: fields of the config as .json or .yaml, or the neuronal_report.json of a "
        "pruned model, whose prune is repeated (default: none)",
    )


def read_fields(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config's fields that the recipe holds, and those that were given as flags.

    Raises:
        `ValueError`: there are neither sparsity nor bits_per_weight among them, or the recipe cannot be read.
    """
    recipe, given = {}, given_fields(args)
    if args.config:
        from ..config import read_config_file

        recipe = read_config_file(args.config)
    if not {"sparsity", "bits_per_weight"} & (recipe | given).keys():
        raise ValueError(
            "--sparsity is missing: give a share of the weights, such as 0.7, or --bits-per-weight, such as 2.4, or a recipe by --config."
        )
    return recipe, given


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The config's fields among the flags that were given; hyper-parameters apart from methods' names."""
    from ..registry import parse_method

    values = {name: value for name, value in vars(args).items() if name in CONFIG_FLAGS}
    for kind in ("saliency", "topup"):
        if isinstance(values.get(kind), str):
            values[kind], values[f"{kind}_args"] = parse_method(values[kind])
    return values
