"""Flags of the commands of `optimum-cli neuronal`. Those of the config are derived from its fields."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from ..checkpoint.writing import SaveOptions
from ..common.processes import Processes
from ..common.torch_state import MemoryLimits, default_device
from ..config.config_fields import ConfigFields, value_type
from ..config.presets import REGISTRIES
from ..data.documents import check_texts
from ..files.records import run_directory
from ..model.load_model import load_model, load_streamed
from ..model.origin import find_tokenizer
from ..model.sources import Source, locate
from .command import spelled


Flags = argparse._ActionsContainer  # a parser, or a group of its flags
RESULT_NEEDS = {"private": "push_to_hub", "window": "evaluate", "max_windows": "evaluate"}  # of [`add_result_flags`]
MAX_WINDOWS = 16  # of each test set, to measure a model before and after: a small part of the work
DTYPES = ("float32", "bfloat16", "float16")
CONFIG_FLAGS = {entry.name: entry for entry in fields(ConfigFields) if entry.metadata.get("flag", True)}


def describe(parser: argparse.ArgumentParser, usage: str | None, description: str, examples: Sequence[str]) -> None:
    parser.usage = usage and f"{parser.prog} {usage}"  # argparse names subcommands after the usage of their group
    parser.description = description
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=78)  # as in the pages of `help`
    parser.epilog = "\n".join(["examples:", *(f"  {parser.prog} {example}".rstrip() for example in examples)])


def add_config_flags(
    parser: Flags,
    names: Iterable[str] = CONFIG_FLAGS,
    several: Mapping[str, str] = {},
    known: Mapping[str, Field] = CONFIG_FLAGS,
) -> None:
    """Add flags of fields of a config. `several` maps fields that take several values to their default in words."""
    for name in names:
        entry = known[name]
        kind, meaning = value_type(entry), entry.metadata["help"]
        unset = several.get(name, entry.metadata.get("unset", entry.default))
        unset = "required, unless --preset or --config has it" if unset is MISSING else unset
        options: dict[str, Any] = {"type": next(iter(get_args(kind)), kind)}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        if name in several or get_args(kind):
            options["nargs"] = "+"
        if "metavar" in entry.metadata:
            options["metavar"] = entry.metadata["metavar"]
        if name in REGISTRIES:
            meaning += f": {', '.join(REGISTRIES[name].names())}; with hyperparameters: {entry.metadata['example']}"
        unset = {False: "no", True: "yes"}[unset] if isinstance(unset, bool) else unset
        shown = unset if str(unset).startswith("required") else f"default: {unset}"
        parser.add_argument(spelled(name), default=argparse.SUPPRESS, help=f"{meaning} ({shown})", **options)


def add_import_flag(parser: Flags) -> None:
    meaning = (
        "Python module with methods or families of your own, in the working directory or installed (default: none)"
    )
    parser.add_argument("--import", dest="modules", metavar="MODULE", nargs="+", default=[], help=meaning)


def import_modules(names: Sequence[str]) -> None:
    """Import the modules that `--import` names, which register methods."""
    if names:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    for name in names:
        importlib.import_module(name)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config's fields among the flags that were given."""
    return {name: value for name, value in vars(args).items() if name in CONFIG_FLAGS}


def add_switch(parser: Flags, flag: str, meaning: str) -> None:
    """Add a flag without a value, which is off unless it is given."""
    parser.add_argument(flag, action="store_true", help=f"{meaning} (default: no)")


def add_model_flags(parser: Flags, rare: Flags | None = None, required: bool = True) -> None:
    """Add the flags that say which model to load, and how. Rarely needed flags go to a group of their own."""
    rare = rare or parser
    needed = "required" if required else "required, unless --merge is given"
    parser.add_argument(
        "--model", required=required, help=f"Hub id or directory of the model, or a GGUF file ({needed})"
    )
    dtype = "dtype to compute in; on a CPU float32 is often much faster (default: auto, the checkpoint's)"
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype)
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator if there is one, else cpu)")
    rare.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
    add_switch(rare, "--trust-remote-code", "run code that comes with the model")


def add_result_flags(parser: Flags, dtype: str, measured: str, needed: str = "required") -> None:
    """Add the flags of what is saved and published. `dtype` and `measured` are defaults in words."""
    parser.add_argument("--output", required=needed == "required", help=f"directory to save the model in ({needed})")
    add_overwrite_flag(parser)
    format = "packed: small, loads with this package (default: dense)"
    parser.add_argument("--format", choices=("dense", "packed"), default="dense", help=format)
    parser.add_argument("--save-dtype", choices=DTYPES, help=f"dtype of the saved weights (default: {dtype})")
    evaluate = f"test text: measure perplexity before and after (default: {measured})"
    parser.add_argument("--evaluate", nargs="+", default=[], metavar="DATASET", help=evaluate)
    add_window_flags(parser, MAX_WINDOWS)
    answers = (
        "compare the answers to 48 built-in questions, or to the prompts of a file, before and after (default: no)"
    )
    parser.add_argument("--answers", metavar="FILE", nargs="?", const=True, default=False, help=answers)
    push = "publish the result as this repository; --overwrite replaces a model there (default: no)"
    parser.add_argument("--push-to-hub", metavar="ID", help=push)
    add_switch(parser, "--private", "make that repository private")


def add_memory_flags(parser: Flags, prunes: bool = True) -> None:
    """Add the flags of models and batches that take much memory."""
    add_switch(parser, "--stream", "read weights from disk one block at a time, for models larger than memory")
    placement = "auto, balanced, ...: let accelerate spread the weights over devices (default: all on --device)"
    parser.add_argument("--device-map", help=placement)
    default = "about 2048 tokens to measure" + (
        ", and 8192 to prune on an accelerator; one on a CPU" if prunes else ""
    )
    batch = f"sequences per forward pass (default: {default})"
    parser.add_argument("--batch-size", type=int, help=batch)
    if not prunes:
        return
    beyond = "keep hidden states above this many bytes in CPU memory (default: they stay on the device)"
    parser.add_argument("--max-hidden-bytes", type=int, help=beyond)


def add_overwrite_flag(parser: Flags) -> None:
    add_switch(parser, "--overwrite", "replace the model's directory at --output, with all that is in it")


def add_window_flags(parser: Flags, most: int = 0) -> None:
    window = "tokens per test window (default: 2048, or the model's limit if that is less)"
    parser.add_argument("--window", type=int, help=window)
    windows = f"measure on the first N windows of each test set; 0: all, as papers do (default: {most or 'all'})"
    parser.add_argument("--max-windows", metavar="N", type=int, default=most or None, help=windows)


def add_test_flags(parser: Flags) -> None:
    """Add the flags that say how much text to measure on, and which zero-shot tasks."""
    add_window_flags(parser)
    tasks = "tasks of lm-eval, or 'paper' for the paper's seven; needs the extra [eval] (default: none)"
    parser.add_argument("--tasks", nargs="*", help=tasks)
    parser.add_argument("--limit", type=int, help="ask only the first N questions of each task (default: all)")
    parser.add_argument("--include-path", help="folder of further tasks in lm-eval's YAML format (default: none)")


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a model."""
    options = {"revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}
    if "dtype" in args:
        options["dtype"] = args.dtype
    return options


def source_of(args: argparse.Namespace) -> Source:
    """Return where to load the model from, checked."""
    return locate(args.model, load_options(args))


def memory_of(args: argparse.Namespace) -> MemoryLimits:
    """Return the limits of [`add_memory_flags`], checked."""
    return MemoryLimits(args.batch_size, getattr(args, "max_hidden_bytes", None))


def save_options_of(args: argparse.Namespace) -> SaveOptions:
    """Return how `--format` and `--save-dtype` say to save, checked."""
    return SaveOptions(args.format, args.save_dtype and getattr(torch, args.save_dtype))


@contextmanager
def loaded(
    args: argparse.Namespace,
    source: Source,
    place: Path,
    datasets: Sequence[Any] = (),
    tests: Iterable[Any] = (),
) -> Iterator[tuple[Any, Any]]:
    """Load the model where `--device`, `--stream` and `--device-map` say, and its tokenizer or None.

    Weights that have to be rewritten lie on the disk of `place`, next to it. `datasets`, `tests`: of [`check_texts`].
    """
    device, tokenizer = device_of(args), find_tokenizer(source)
    check_texts(tokenizer, datasets, tests)
    if not args.stream and not args.device_map:
        yield load_model(source).to(device), tokenizer
        return
    with run_directory(place.absolute().parent / f".{place.name}.weights-{Processes.current().rank}") as folder:
        if args.stream:
            yield load_streamed(source, device, str(folder)), tokenizer
        else:
            yield load_model(source, device_map=args.device_map, offload_folder=str(folder)), tokenizer


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to compute on. torch raises an error if it is not available."""
    return torch.empty(0, device=args.device or default_device()).device
