"""The flags of the config's fields and aliases, derived from `config_fields`. Imports nothing heavy, see `command`."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

from ..config_fields import ALIASES, ConfigFields
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


class Flag(NamedTuple):
    """How a field is given on the command line.

    Args:
        default (`str`): what the config takes if the flag is not given, in words; or that it is required.
        options (`dict[str, Any]`): further arguments of `add_argument`.
        meaning (`str`): of the field, in a line.
    """

    default: str
    options: dict[str, Any]
    meaning: str


def _config_flags() -> dict[str, Flag]:
    """Name of the field or alias -> its flag; aliases in the place of `topup_args`, whose entries they are."""
    flags = {}
    for entry in fields(ConfigFields):
        if "help" in entry.metadata:
            flags[entry.name] = _flag(entry.type, entry.default, entry.metadata)
            if entry.name in READ_BY:
                flags[entry.name].options["type"] = READ_BY[entry.name]
        elif entry.name == "topup_args":
            for name, alias in ALIASES.items():
                flags[name] = _flag(alias.type, alias.default, {"help": alias.help, "metavar": alias.metavar})
    return flags


def _flag(kind: Any, default: Any, metadata: Mapping[str, Any]) -> Flag:
    options = _parsing(kind)
    if metadata.get("metavar"):
        options["metavar"] = metadata["metavar"]
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    meaning = metadata["help"]
    if "room" in metadata:
        meaning += f": {methods(metadata['room'])}; with hyper-parameters: {metadata['example']}"
    return Flag(metadata.get("default", shown), options, meaning)


def _parsing(kind: Any) -> dict[str, Any]:
    """How `argparse` reads values of a field's type."""
    if isinstance(kind, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return {"type": get_args(kind)[0], "nargs": "+"} if get_origin(kind) is Sequence else {"type": kind}


READ_BY = {"sparsity": share}  # what checks more than a field's type
CONFIG_FLAGS = _config_flags()


def add_config_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """A flag for every field of the config but some; one that is not given is left to the config."""
    for name, (default, options, meaning) in CONFIG_FLAGS.items():
        if name in without:
            continue
        shown = default if default.startswith("required") else f"default: {default}"
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
    from ..config_files import read_config_file

    recipe, given = read_config_file(args.config) if args.config else {}, given_fields(args)
    if not {"sparsity", "bits_per_weight"} & (recipe | given).keys():
        raise ValueError(
            "--sparsity is missing: give a share of the weights, such as 0.7, or --bits-per-weight, such as 2.4, or a recipe by --config."
        )
    return recipe, given


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The config's fields and aliases among the flags that were given; hyper-parameters apart from methods' names."""
    from ..registry import parse_method

    values = {name: value for name, value in vars(args).items() if name in CONFIG_FLAGS}
    for kind in ("saliency", "topup"):
        if isinstance(values.get(kind), str):
            values[kind], values[f"{kind}_args"] = parse_method(values[kind])
    return values
