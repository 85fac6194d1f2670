"""Flags that commands of `optimum-cli neuronal` share, and what they mean. Imports nothing heavy, see `commands`."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


LAMBDAS = "0.01 0.02 0.03 0.04 0.05 0.06 0.07 0.08 0.09 0.1 0.12 0.15 0.2 0.25"
DATASETS = "c4, wikitext2, ptb; a Hub dataset as ID:SPLIT:COLUMN; or a local .txt, .jsonl or .parquet file (FILE or FILE:COLUMN)"


def methods(kind: str) -> str:
    """Names of the methods that come with the package, read off their files, so that none need be imported."""
    files = (Path(__file__).parents[1] / kind).glob("*.py")
    found = (re.findall(r'^@register_\w+\("(\w+)"\)', file.read_text(encoding="utf-8"), re.M) for file in files)
    return ", ".join(sorted(name for names in found for name in names))


# Field of NeuronALConfig -> its default as text, how it is parsed, and what it means. A flag that is not given is left
# to the config; a test holds the defaults here to the config's.
CONFIG_FLAGS: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "sparsity": (None, {"type": float, "required": True}, "share of the projections' weights to set to zero: 0.7"),
    "saliency": ("wanda", {}, f"how weights are scored: {methods('saliency')}; with hyper-parameters: ria:power=1.0"),
    "topup": (
        "search",
        {},
        f"where the sparsity goes: {methods('topup')}; with hyper-parameters: owl:half_width=0.1",
    ),
    "steps": ("both", {}, "steps of --topup neuronal: both, block or row"),
    "reference": ("sparse-stream", {}, "where dense activations come from: sparse-stream or dense"),
    "alignment_scope": ("sequence", {}, "alignment error by sequence (the paper) or pooled (its authors' code)"),
    "block_lambdas": (
        LAMBDAS,
        {"type": float, "nargs": "+", "metavar": "X"},
        "half-widths of the sparsity window, block step",
    ),
    "row_lambdas": (
        f"0.0 {LAMBDAS}",
        {"type": float, "nargs": "+", "metavar": "X"},
        "half-widths of the sparsity window, row step",
    ),
    "dataset": ("c4", {}, f"calibration text: {DATASETS}"),
    "num_samples": ("128", {"type": int}, "calibration sequences"),
    "num_alignment_samples": ("8", {"type": int}, "how many of them the top-up measures its candidates on"),
    "seq_length": ("the smaller of 2048 and what the model admits", {"type": int}, "tokens per sequence"),
    "batch_size": (
        "what makes about 2048 tokens",
        {"type": int},
        "sequences per forward: memory and speed, not the result",
    ),
    "max_hidden_bytes": (
        "they stay on the device",
        {"type": int},
        "hidden states beyond this many bytes wait in CPU memory: memory and speed, not the result",
    ),
    "min_expert_tokens": (
        "32",
        {"type": int},
        "an expert that receives fewer calibration tokens is pruned as if all its inputs were equally active",
    ),
    "seed": ("0", {"type": int}, "seed of the draw of calibration sequences"),
    "targets": (
        "all projections",
        {"nargs": "+", "metavar": "REGEX"},
        "regular expressions: prune only modules whose names match",
    ),
    "ignore": ("none", {"nargs": "+", "metavar": "REGEX"}, "regular expressions: leave out modules whose names match"),
    "pattern": (
        "zeros may lie anywhere in a row",
        {"metavar": "N:M"},
        "keep N of every M consecutive weights of a row (2:4, 4:8), with --topup uniform",
    ),
    "format": (
        "dense",
        {},
        "how weights are saved: dense, ordinary safetensors with zeros; or packed, the non-zero values and bitmasks, which "
        "load with this package only",
    ),
}


def add_config_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """A flag for every field of the config but some."""
    for field, (default, options, meaning) in CONFIG_FLAGS.items():
        if field in without:
            continue
        shown = "required" if default is None else f"default: {default}"
        flag = "--" + field.replace("_", "-")
        parser.add_argument(flag, default=argparse.SUPPRESS, help=f"{meaning} ({shown})", **options)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to load it."""
    parser.add_argument("--model", required=True, help="Hub id or directory of the model (required)")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16 or float16; on a CPU float32 is often much faster (default: auto, the checkpoint's)",
    )
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator if there is one, else cpu)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model (default: no)"
    )


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Which zero-shot tasks."""
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        help="zero-shot tasks of lm-eval, or 'paper' for the paper's seven; needs the extra [eval] (default: none)",
    )
    parser.add_argument("--limit", type=int, help="ask the first so many questions of each task (default: all)")
    parser.add_argument("--include-path", help="folder of further tasks in lm-eval's YAML format (default: none)")


def config_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The config's fields among the flags that were given."""
    from ..runtime.registry import parse_method

    values = {field: value for field, value in vars(args).items() if field in CONFIG_FLAGS}
    for kind in ("saliency", "topup"):
        if isinstance(values.get(kind), str):
            values[kind], values[f"{kind}_args"] = parse_method(values[kind])
    return values


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """For `from_pretrained`."""
    return {"dtype": args.dtype, "revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}


def device_of(args: argparse.Namespace):
    """Where to compute."""
    import torch

    from ..decoder.placement import default_device

    return torch.device(args.device) if args.device else default_device()
