"""Flags that commands of `optimum-cli neuronal` share beside the config's. Imports nothing heavy, see `command`."""

import argparse
from typing import Any

from .parser import dtype


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to load it."""
    parser.add_argument("--model", required=True, help="Hub id or directory of the model (required)")
    parser.add_argument("--revision", help="branch, tag or commit of the model on the Hub (default: main)")
    parser.add_argument(
        "--dtype",
        type=dtype,
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


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """For `from_pretrained`."""
    return {"dtype": args.dtype, "revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}


def device_of(args: argparse.Namespace):
    """Where to compute."""
    import torch

    from ..decoder.placement import default_device

    return torch.device(args.device) if args.device else default_device()
