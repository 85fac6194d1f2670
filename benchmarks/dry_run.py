"""Compare time and memory that a dry run estimates with time and memory that the prune takes.

    python -m benchmarks.dry_run [--topups NAME ...] [--saliencies wanda alps] [--vocabularies 4000 64000] [--threads 2]

A randomly initialised Llama is planned and pruned with every top-up, each in a process of its own. Time is that of the
prune without reading calibration data; with one thread it is the processor's, for the plan too, so that others on the
machine do not count. Memory is the process's largest resident size (Linux) above that with the model, with freed
memory handed back at once, and is held against what the plan tells beside the model. Interpreter and libraries are warmed
up by pruning a tiny model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from unittest import mock

import torch
from transformers.utils import logging

from benchmarks.memory import MALLOC, resident
from benchmarks.random_models import random_llama
from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.display import format_table
from optimum_neuronal.common.machine import hand_back_freed, reset_peak_memory
from optimum_neuronal.pruning import sample_blocks
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.topup import TOPUPS


SIZES = {  # flag -> default, what it is
    "hidden_size": (512, "of the model"),
    "blocks": (4, "of the model"),
    "tokens": (256, "of a calibration sequence"),
    "sequences": (32, "of calibration data"),
    "alignment": (8, "sequences that trials are measured on"),
}


def measure(topup: str, saliency: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """One prune in this process: seconds and bytes, foretold and found."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (args.sequences, args.tokens))
    pruned = {"sparsity": 0.7, "saliency": saliency, "topup": topup}
    fields = {
        **(pruned if args.bits is None else {"bits_per_weight": args.bits}),
        "dataset": None,
        "num_samples": args.sequences,
        "num_alignment_samples": args.alignment,
        "seq_length": args.tokens,
    }
    config = NeuronALConfig(**fields)
    NeuronALPruner(config).prune(random_llama(64, 2, args.tokens), ids)
    model = random_llama(args.hidden_size, args.blocks, args.tokens, vocabulary)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sample_blocks, "clock", clock),
    ):
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
        plan = plan_prune(folder, config, dtype=torch.float32)
    hand_back_freed()
    before = resident("VmRSS")
    reset_peak_memory()
    start = clock()
    NeuronALPruner(config).prune(model, ids)
    seconds = clock() - start
    return {
        "foretold_seconds": plan.seconds,
        "seconds": seconds,
        "foretold_bytes": plan.working_bytes,
        "bytes": resident("VmHWM") - before,
    }


def run(topup: str, saliency: str, vocabulary: int, args: argparse.Namespace) -> dict[str, float]:
    """[`measure`] in processes of its own: of the one that hands memory back, which takes time, only the memory counts."""
    command = [sys.executable, "-m", "benchmarks.dry_run", "--one", topup, saliency, str(vocabulary)]
    for name in SIZES:
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command += ["--bits", str(args.bits)] if args.bits is not None else []
    found = {}
    for more, kept in (({}, "seconds"), (MALLOC, "bytes")):
        environment = {**os.environ, **more, "OMP_NUM_THREADS": str(args.threads)}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if result.returncode:
            raise RuntimeError(result.stderr[-2000:])
        told = json.loads(result.stdout.splitlines()[-1])
        found |= {key: value for key, value in told.items() if key.endswith(kept)}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topups", nargs="+", default=TOPUPS.names(), help="(default: all)")
    parser.add_argument("--saliencies", nargs="+", default=["wanda"], help="(default: wanda)")
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[4000, 64000], help="(default: 4000 64000)")
    parser.add_argument(
        "--bits", type=float, help="a weight: quantise, whatever the top-ups and saliencies, of which name one"
    )
    for name, (default, what) in SIZES.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"{what} (default: {default})"
        )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        topup, saliency, vocabulary = args.one
        sys.stdout.write(json.dumps(measure(topup, saliency, int(vocabulary), args)) + "\n")
        return
    header = ["top-up", "vocabulary", "s foretold", "s", "times", "MB foretold", "MB", "times"]
    rows = []
    for saliency in args.saliencies:
        for topup in args.topups:
            for vocabulary in args.vocabularies:
                found = run(topup, saliency, vocabulary, args)
                times = [found[key] / found[f"foretold_{key}"] for key in ("seconds", "bytes")]
                rows.append(
                    [
                        f"{saliency}, {topup}",
                        f"{vocabulary:,}",
                        *(f"{found[key]:.1f}" for key in ("foretold_seconds", "seconds")),
                        f"{times[0]:.2f}",
                        *(f"{found[key] / 1e6:.0f}" for key in ("foretold_bytes", "bytes")),
                        f"{times[1]:.2f}",
                    ]
                )
                sys.stdout.write(" ".join(rows[-1]) + "\n")
                sys.stdout.flush()
    sys.stdout.write(f"\n{format_table(header, rows)}\n")


if __name__ == "__main__":
    main()
