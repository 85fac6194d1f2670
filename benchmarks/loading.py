"""Measure seconds and peak memory of loading a packed and a dense checkpoint.

    python -m benchmarks.loading [--layers 16] [--hidden-size 2048] [--repeats 3]

A random Llama, by default with the shapes of Llama-3.2-1B, 70 % sparse in bfloat16, is saved in both formats. Each load
runs in its own process, with files in the system's cache. "s to forward" includes a first forward of 8 tokens, because
transformers maps dense files and reads them on first use.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import optimum_neuronal
from benchmarks.shared import MALLOC, random_llama, resident, zero_randomly
from optimum_neuronal.common.display import format_table


def load(folder: str) -> dict[str, float]:
    """Load a checkpoint in this process."""
    AutoModelForCausalLM.from_config(random_llama(16, 1, 8).config)  # imports what loading should not count
    before, start = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = time.perf_counter() - start
    with torch.no_grad():
        model(torch.arange(8)[None])
    return {"load": loaded, "forward": time.perf_counter() - start, "peak": resident("VmHWM") - before}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16, help="(default: 16)")
    parser.add_argument("--hidden-size", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--repeats", type=int, default=3, help="(default: 3)")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.load:
        print(json.dumps(load(args.load)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = random_llama(args.hidden_size, args.layers, 4096, vocab_size=32000).bfloat16()
        zero_randomly(model, 0.7)
        for form in ("dense", "packed"):
            folder = Path(name) / form
            optimum_neuronal.save_pretrained(model, folder, format=form)
            command = [sys.executable, "-m", "benchmarks.loading", "--load", str(folder)]
            options = {"env": {**os.environ, **MALLOC}, "check": True, "capture_output": True, "text": True}
            outputs = [subprocess.run(command, **options).stdout for _ in range(args.repeats)]
            found = [json.loads(output.splitlines()[-1]) for output in outputs]
            medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            row = [form, f"{size / 1e6:.0f}", f"{medians['load']:.2f}", f"{medians['forward']:.2f}"]
            rows.append([*row, f"{medians['peak'] / 1e6:.0f}"])
    print(format_table(["format", "MB of files", "s to load", "s to forward", "peak MB"], rows))


if __name__ == "__main__":
    main()
