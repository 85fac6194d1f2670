"""Measure how much perplexity retraining brings back: run every example on the demo's model.

    python -m benchmarks.recovery [--steps 200] [--sparsity 0.7]

The model is pruned by Wanda with the search, as examples/gradual_pruning.py prunes it. Then every example trains it on the
source of Python's standard library without the modules of calibration.txt and heldout.txt, 8 sequences of 256 tokens a
step. Perplexity is measured as in the demonstration, on 96 windows of 256 tokens of heldout.txt. Prints the table of
benchmarks/recovery.md.
"""

import argparse
import contextlib
import hashlib
import runpy
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.demo.run import SEQ_LENGTH, TEST_WINDOWS, TINY_MODEL, load_tiny_model


EXAMPLES = Path(__file__).parent.parent / "examples"
CHARACTERS = 3_000_000  # of training text
SKIP = {"site-packages", "__pycache__", "encodings", "pydoc_data", "data", "cjkencodings"}  # as train_tiny_model.py


def training_text() -> str:
    """Modules that neither calibration.txt nor heldout.txt is from, in the order of examples/train_tiny_model.py."""
    library, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for file in library.rglob("*.py"):
        digest = hashlib.sha256(file.relative_to(library).as_posix().encode()).digest()
        if digest[0] % 25 > 1 and not SKIP & set(file.relative_to(library).parts):
            texts.append((digest, file.read_text(encoding="utf-8", errors="replace")))
    return "\n".join(text for _, text in sorted(texts))[:CHARACTERS]


def run_example(name: str, **options) -> None:
    """Runs a script of examples/ as it is, what it prints going to the standard error."""
    arguments = [text for key, value in options.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    before, sys.argv = sys.argv, [name, *arguments]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def measure(directory: Path) -> tuple[float, float]:
    """Share of zeros in the projections, counted by their names, and perplexity on heldout.txt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = [weight for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = str(TINY_MODEL / "heldout.txt")
    return zeros, evaluate_perplexity(model, tokenizer, text, SEQ_LENGTH, max_windows=TEST_WINDOWS)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    parser.add_argument("--sparsity", type=float, default=0.7, help="(default: 0.7)")
    parser.add_argument("--num-samples", type=int, default=128, help="calibration sequences (default: 128)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    print("| model | steps | sparsity before | after | perplexity | minutes |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), args)


def compare(folder: Path, args: argparse.Namespace) -> None:
    """Prints a row for every way, as soon as it is known."""
    dense, pruned, text = folder / "dense", folder / "pruned", folder / "train.txt"
    model, tokenizer = load_tiny_model()
    model.save_pretrained(dense)
    tokenizer.save_pretrained(dense)
    row("dense", 0, None, dense, 0)
    calibration = str(TINY_MODEL / "calibration.txt")
    fields = {"dataset": calibration, "seq_length": SEQ_LENGTH, "num_samples": args.num_samples}
    pruner = NeuronALPruner(NeuronALConfig(args.sparsity, saliency="wanda", **fields), tokenizer)
    start = time.perf_counter()
    pruner.save(pruner.prune(model), pruned)
    before = row("pruned", 0, 0.0, pruned, time.perf_counter() - start)
    text.write_text(training_text(), encoding="utf-8")
    glance = folder / "glance.txt"  # the examples' own evaluation, which is not shown here
    glance.write_text((TINY_MODEL / "calibration.txt").read_text(encoding="utf-8")[:3000], encoding="utf-8")
    common = {"train": text, "evaluate": glance, "steps": args.steps}
    for title, name, options in (
        ("pruned + full fine-tuning", "finetune.py", {"model": pruned}),
        ("pruned + LoRA, merged", "finetune_lora.py", {"model": pruned}),
        ("pruned + distillation", "distill.py", {"model": pruned, "teacher": dense}),
        ("pruned gradually in training", "gradual_pruning.py", {"model": dense, "num_samples": args.num_samples}),
    ):
        output, start = folder / name.removesuffix(".py"), time.perf_counter()
        run_example(name, output=output, **options, **common)
        seconds = time.perf_counter() - start
        row(title, args.steps, before if options["model"] == pruned else 0.0, output, seconds)


def row(title: str, steps: int, before: float | None, directory: Path, seconds: float) -> float:
    """Prints a line of the table; returns the sparsity."""
    sparsity, perplexity = measure(directory)
    shown = "" if before is None else f"{before:.2%}"
    print(
        f"| {title} | {steps or ''} | {shown} | {sparsity:.2%} | {perplexity:.2f} | {seconds / 60:.1f} |", flush=True
    )
    return sparsity


if __name__ == "__main__":
    main()
