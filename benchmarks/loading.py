"""Measure seconds and peak memory of loading a packed and a dense checkpoint.

    python benchmarks/loading.py [--layers 12] [--repeats 5] [--folder .]

Makes a Llama with random weights at 70 % in bfloat16, saves it in both formats, and loads each in processes of their own,
in turn. transformers maps a dense file into memory, and the system reads it when the weights are first used. So what counts
is the time until every page of the weights has been touched, and until a first forward is done; the time of
`from_pretrained` alone is told too. Every run is done with the files
dropped from the system's cache, and with them in it. For the peak the C library is told to hand freed memory back at once,
which costs time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import optimum_neuronal
from optimum_neuronal.common.display import format_table
from optimum_neuronal.common.machine import peak_memory, reset_peak_memory


TIMES, PAGE = ("load", "read", "use"), 4096
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def make(folder: Path, layers: int) -> dict[str, float]:
    """Saves the model in both formats; sizes in bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=16
    )
    model = LlamaForCausalLM(config).bfloat16()
    projections = [p for name, p in model.named_parameters() if "_proj" in name]
    for projection in projections:
        projection.data[torch.rand(projection.shape) < 0.7] = 0
    for format in ("dense", "packed"):
        optimum_neuronal.save_pretrained(model, folder / format, format=format)
    return {
        "model": model.get_memory_footprint(),
        "projection": max(p.nbytes for p in projections),
        "projections": sum(p.nbytes for p in projections),
        "dense": sum(file.stat().st_size for file in (folder / "dense").glob("*.safetensors")),
        "packed": sum(file.stat().st_size for file in (folder / "packed").glob("*.safetensors")),
    }


def load(folder: str, cached: bool) -> None:
    """Loads a checkpoint in this process and writes what it cost."""
    for file in Path(folder).glob("*.safetensors"):
        with file.open("rb") as opened:
            if cached:
                while opened.read(2**24):
                    pass
            else:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    logging.disable_progress_bar()
    tiny = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=1, num_hidden_layers=1)
    LlamaForCausalLM(tiny)(torch.arange(8)[None])  # imports what loading does not count
    reset_peak_memory()
    before = peak_memory()["host"]
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded, memory = time.perf_counter() - start, peak_memory()["host"] - before
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8)[::PAGE].sum()
    read = time.perf_counter() - start
    with torch.no_grad():
        model(torch.arange(8)[None])
    used = time.perf_counter() - start
    sys.stdout.write(json.dumps({"load": loaded, "read": read, "use": used, "memory": memory}))


def measure(folder: Path, cached: bool, repeats: int) -> dict[str, dict[str, float]]:
    """Format -> medians of the seconds, and the peak of a run of its own, in which freed memory is handed back at once."""
    found = {}
    runs = [(format, run(folder / format, cached)) for _ in range(repeats) for format in ("dense", "packed")]
    for format in ("dense", "packed"):
        own = [costs for made, costs in runs if made == format]
        found[format] = {key: statistics.median(costs[key] for costs in own) for key in TIMES}
        found[format]["memory"] = run(folder / format, cached, MALLOC)["memory"]
    return found


def run(folder: Path, cached: bool, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """[`load`] in a process of its own."""
    command = [sys.executable, __file__, "--load", folder, *(["--cached"] if cached else [])]
    result = subprocess.run(command, check=True, capture_output=True, env={**os.environ, **(environment or {})})
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", help="where the checkpoints are written for the time being (default: the system's)"
    )
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(args.load, args.cached)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        sizes = make(Path(folder), args.layers)
        for cached in (False, True):
            for format, found in measure(Path(folder), cached, args.repeats).items():
                beyond = (found["memory"] - sizes["model"]) / sizes["projection"]
                seconds = [f"{found[key]:.2f}" for key in TIMES]
                rows.append(
                    [format, "yes" if cached else "no", *seconds, f"{found['memory'] / 1e6:.0f}", f"{beyond:+.2f}"]
                )
    header = [
        "format",
        "cached",
        "s to load",
        "s to read",
        "s to first forward",
        "peak MB",
        "beyond the model, in projections",
    ]
    sys.stdout.write(
        f"model {sizes['model'] / 1e6:.0f} MB, of which projections {sizes['projections'] / 1e6:.0f} MB; files "
        f"{sizes['dense'] / 1e6:.0f} MB dense, {sizes['packed'] / 1e6:.0f} MB packed; {torch.get_num_threads()} threads\n\n"
        f"{format_table(header, rows)}\n"
    )


if __name__ == "__main__":
    main()
