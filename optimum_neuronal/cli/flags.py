"""Flags of the commands of `optimum-cli neuronal`, and how they are read. Flags of the config come from `config_fields`."""

import argparse
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

from ..common.validation import check_sparsity, did_you_mean
from ..config.config_fields import ConfigFields, kind_of


Flags = argparse._ActionsContainer  # a parser, or a group of its flags
DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
KNOWN_DTYPES = ("auto", "float32", "bfloat16", "float16")
# Of torch; further ones come with packages that say so to torch.
DEVICES = (
    "cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "ipu", "maia", "ve", "fpga", "vulkan", "opencl", "opengl", "hip",
    "mkldnn", "ideep", "lazy", "meta", "privateuseone",
)  # fmt: skip


def share(text: str) -> float:
    """Return a sparsity in [0, 1), or raise `ArgumentTypeError`."""
    with suppress(ValueError):
        text = float(text)
    try:
        return check_sparsity(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Return a whole number of at least 1, or raise `ArgumentTypeError`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1.")
    return int(text)


def dtype(text: str) -> str:
    """Return the name of a dtype, which may be given by its usual short name, or raise `ArgumentTypeError`."""
    name = DTYPES.get(text.lower(), text.lower()).removeprefix("torch.")
    if name not in KNOWN_DTYPES:
        expected = f"expected one of {', '.join(KNOWN_DTYPES)}.{did_you_mean(text, [*KNOWN_DTYPES, *DTYPES])}"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
    return name


def device(text: str) -> str:
    """Return the name of a device, or raise `ArgumentTypeError`. Torch decides later whether it is there."""
    name, colon, index = text.partition(":")
    known = name in DEVICES or next(iter(entry_points(group="torch.backends")), None)
    if not known or (colon and not index.isdecimal()):
        expected = f"expected cpu, cuda, cuda:1, mps, xpu or another device of torch.{did_you_mean(name, DEVICES)}"
        raise argparse.ArgumentTypeError(f"{text!r}: {expected}")
    return text


CONFIG_FLAGS = {entry.name: entry for entry in fields(ConfigFields) if entry.metadata.get("flag", True)}
READ_BY = {"sparsity": share}  # field -> function that reads its text


@cache
def methods(room: str) -> str:
    """Return the names of the package's methods, in order, with commas. They are read off files; none is imported.

    Args:
        room (`str`): the folder of the methods: `"saliency"` or `"topup"`.
    """
    files = (Path(__file__).parents[1] / room).glob("*.py")
    found = (re.findall(r'^@register_\w+\("(\w+)"\)', file.read_text(encoding="utf-8"), re.M) for file in files)
    return ", ".join(sorted(name for names in found for name in names))


def add_config_flags(
    parser: Flags, names: Iterable[str] = CONFIG_FLAGS, several: Mapping[str, str] | None = None
) -> None:
    """Add flags of fields of the config. A flag that is not given is left to the config.

    Args:
        parser (`ArgumentParser`): of the command, or a group of its flags.
        names (`Iterable[str]`): of the fields.
        several (`Mapping[str, str]`, *optional*): field that takes several values -> its default in words.
    """
    several = several or {}
    for name in names:
        entry = CONFIG_FLAGS[name]
        kind, meaning = kind_of(entry), entry.metadata["help"]
        unset = several.get(name, entry.metadata.get("unset", entry.default))
        options: dict[str, Any] = {"type": READ_BY.get(name, kind)}
        if name in several or get_args(kind):
            options = {"type": READ_BY.get(name, next(iter(get_args(kind)), kind)), "nargs": "+"}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        if "metavar" in entry.metadata:
            options["metavar"] = entry.metadata["metavar"]
        if "methods" in entry.metadata:
            example = entry.metadata["example"]
            meaning += f": {methods(entry.metadata['methods'])}; with hyper-parameters: {example}"
        shown = unset if str(unset).startswith("required") else f"default: {unset}"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"{meaning} ({shown})", **options)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config's fields among the flags that were given; hyper-parameters apart from methods' names."""
    from ..common.registry import parse_method

    values = {name: value for name, value in vars(args).items() if name in CONFIG_FLAGS}
    for kind in ("saliency", "topup"):
        if isinstance(values.get(kind), str):
            values[kind], values[f"{kind}_args"] = parse_method(values[kind])
    return values


def add_switch(parser: Flags, flag: str, meaning: str) -> None:
    """Add a flag without a value, which is off unless it is given."""
    parser.add_argument(flag, action="store_true", help=f"{meaning} (default: no)")


def add_model_flags(parser: Flags, rare: Flags | None = None) -> None:
    """Add the flags that say which model to load, and how; rarely needed flags get a group of their own."""
    rare = rare or parser
    parser.add_argument("--model", required=True, help="Hub id or directory of the model (required)")
    parser.add_argument(
        "--dtype",
        type=dtype,
        default="auto",
        help="float32, bfloat16 or float16; on a CPU float32 is often much faster (default: auto, the checkpoint's)",
    )
    parser.add_argument(
        "--device", type=device, help="cpu, cuda, mps, ... (default: the accelerator if there is one, else cpu)"
    )
    rare.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
    add_switch(rare, "--trust-remote-code", "run code that comes with the model")


def add_memory_flags(parser: Flags) -> None:
    """Add the flags that trade memory for speed."""
    batch = "sequences per forward, which change the result by rounding at most (default: about 2048 tokens)"
    parser.add_argument("--batch-size", type=int, help=batch)
    beyond = "hidden states beyond this many bytes wait in CPU memory (default: they stay on the device)"
    parser.add_argument("--max-hidden-bytes", type=int, help=beyond)


def add_overwrite_flag(parser: Flags) -> None:
    """Add the flag of commands that write a checkpoint."""
    kept = "write to a directory that holds other things too: another model's files are replaced, all others stay"
    add_switch(parser, "--overwrite", kept)


def add_json_flag(parser: Flags) -> None:
    """Add the flag of commands that print tables."""
    add_switch(parser, "--json", "print JSON instead of tables")


def add_test_flags(parser: Flags) -> None:
    """Add the flags that say how much text to measure on, and which zero-shot tasks."""
    parser.add_argument("--max-windows", type=count, help="measure on the first so many windows (default: all)")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        help="zero-shot tasks of lm-eval, or 'paper' for the paper's seven; needs the extra [eval] (default: none)",
    )
    parser.add_argument("--limit", type=count, help="ask the first so many questions of each task (default: all)")
    parser.add_argument("--include-path", help="folder of further tasks in lm-eval's YAML format (default: none)")


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a model."""
    return {"dtype": args.dtype, "revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}


def load(args: argparse.Namespace, device) -> tuple[Any, Any]:
    """Return the model on a device, and its tokenizer."""
    from transformers import AutoTokenizer

    from ..model.load_model import load_model

    options = load_options(args)
    model = load_model(args.model, **options).to(device)
    del options["dtype"]
    return model, AutoTokenizer.from_pretrained(args.model, **options)


def device_of(args: argparse.Namespace):
    """Return the device to compute on. Raise `ValueError` if this machine, or this build of torch, does not have it."""
    import torch

    from ..common.machine import default_device

    if not args.device:
        return default_device()
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:  # each backend has its own
        raise ValueError(
            f"--device {args.device}: torch {torch.__version__} cannot compute there ({str(error).splitlines()[0]}). Leave "
            f"--device out for {default_device()}, or install a torch that is built for the device."
        ) from error
    return device
