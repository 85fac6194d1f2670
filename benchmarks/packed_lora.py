"""Measure memory and time of training LoRA on packed weights, compared with dense weights.

    python -m benchmarks.packed_lora [--hidden-size 2048] [--blocks 4] [--tokens 64]

A random Llama with the shapes of a 1B model, but few blocks, in bfloat16 and with 70% zeros, takes a few AdamW steps on LoRA
of rank 16 for all projections. The dense and the packed model run in separate processes. The peak is the process's largest
resident memory (Linux: /proc) during the steps, minus that before the model is made. The C library returns freed memory at
once. Seconds are the median of the steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers.utils import logging

from benchmarks.shared import MALLOC, random_llama, resident, zero_randomly
from optimum_neuronal import lora_for_packed, sparsify
from optimum_neuronal.common.display import format_table
from optimum_neuronal.common.torch_state import trim_heap


CASES = ("dense", "packed")


def make_model(case: str, args: argparse.Namespace) -> tuple[torch.nn.Module, int]:
    """Return a model with adapters, and the bytes of its projections when they are dense."""
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    model = random_llama(args.hidden_size, args.blocks, args.tokens)
    zero_randomly(model, 0.7)
    size = sum(weight.nbytes for name, weight in model.named_parameters() if "_proj" in name)
    if case == "packed":
        sparsify(model)
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    return get_peft_model(model, lora_for_packed(model, config)), size


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Return bytes of the model and of the peak, and seconds of a step."""
    torch.zeros(512, 512) @ torch.zeros(512, 512)  # libraries make their buffers
    before = resident("VmRSS")
    model, projections = make_model(case, args)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, 1000, (1, args.tokens))
    trim_heap()
    held = resident("VmRSS") - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        model.train()(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak = resident("VmHWM") - before
    return {"projections": projections, "held": held, "peak": peak, "seconds": statistics.median(seconds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--blocks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--tokens", type=int, default=64, help="of a step (default: 64)")
    parser.add_argument("--steps", type=int, default=3, help="(default: 3)")
    parser.add_argument("--case", choices=CASES, help="measure one in this process, and print it as JSON")
    args = parser.parse_args()
    logging.disable_progress_bar()
    if args.case:
        print(json.dumps(measure(args.case, args)))
        return
    results = {}
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.packed_lora", *sys.argv[1:], "--case", case]
        output = subprocess.run(
            command, env={**os.environ, **MALLOC}, check=True, capture_output=True, text=True
        ).stdout
        results[case] = json.loads(output.splitlines()[-1])
    dense = results["dense"]
    rows = [
        [
            case,
            *(f"{result[key] / 1e6:.0f}" for key in ("held", "peak")),
            f"{(dense['peak'] - result['peak']) / dense['projections']:.2f}",
            f"{result['seconds']:.2f}",
        ]
        for case, result in results.items()
    ]
    print(f"The projections take {dense['projections'] / 1e6:.0f} MB dense.")
    print(format_table(["weights", "MB held", "MB at the peak", "saved / projections", "s per step"], rows))


if __name__ == "__main__":
    main()
