"""Flags that commands of `optimum-cli neuronal` share beside the config's. Imports nothing heavy, see `command`."""

import argparse
from typing import Any

from .parser import count, dtype


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


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that trade memory for speed."""
    parser.add_argument(
        "--batch-size",
        type=int,
        help="sequences per forward: memory and speed, and the result by rounding at most (default: as many as make about "
        "2048 tokens)",
    )
    parser.add_argument(
        "--max-hidden-bytes",
        type=int,
        help="hidden states beyond this many bytes wait in CPU memory: memory and speed, not the result (default: they stay "
        "on the device)",
    )


def add_overwrite_flag(parser: argparse.ArgumentParser) -> None:
    """For commands that write a checkpoint."""
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="write to a directory that holds other things too: files of another model in it are replaced, all others "
        "stay (default: no)",
    )


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Which zero-shot tasks."""
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        help="zero-shot tasks of lm-eval, or 'paper' for the paper's seven; needs the extra [eval] (default: none)",
    )
    parser.add_argument("--limit", type=count, help="ask the first so many questions of each task (default: all)")
    parser.add_argument("--include-path", help="folder of further tasks in lm-eval's YAML format (default: none)")


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """For `from_pretrained`."""
    return {"dtype": args.dtype, "revision": args.revision or "main", "trust_remote_code": args.trust_remote_code}


def device_of(args: argparse.Namespace):
    """Where to compute. Raises `ValueError` for a device that this machine, or this build of torch, does not have."""
    import torch

    from ..system.machine import default_device

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
