"""The demonstration, which prunes the small model that comes with the package and measures what it loses."""

import copy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..config.neuronal_config import NeuronALConfig
from ..config.presets import PRESETS
from ..evaluation.perplexity import evaluate_perplexity
from ..pruner import NeuronALPruner


TINY_MODEL = Path(__file__).parent / "tiny_model"
SEQ_LENGTH, TEST_WINDOWS = 256, 96
SPARSITIES = (0.6, 0.7, 0.8)
SAVED = 0.7
METHODS = {  # what is compared -> fields of the config; the first two are the paper's
    "Wanda, uniform": {"saliency": "wanda", "topup": "uniform"},
    "Wanda, NeuronAL": {"saliency": "wanda", "topup": "neuronal:variant=authors"},
    "ALPS, NeuronAL (default)": {},
}
MORE = {  # compared with --all
    "magnitude, uniform": {"saliency": "magnitude", "topup": "uniform"},
    "Wanda, search": {"saliency": "wanda", "topup": "search"},
}
BEST = {"preset best": PRESETS["best"]}  # takes minutes
ROW = "{:<24}  {:>6}  {:>10}  {:>7}  {:>7}"  # a line of the table, written as soon as its prune is finished
BEFORE = """The model: a Llama with {:.1f} M parameters, trained on source code of Python's standard library.
Perplexity: on {} windows of {} tokens of source code that it never saw; lower is better.
The paper's comparison: Wanda with uniform sparsity, and with NeuronAL as its authors ran it. All other rows go beyond it.
This takes {} on two cores.
"""
PROMPT = "def __init__(self, name, value=None):\n    self.name ="


def load_tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the small Llama that comes with the package, in float32 (CPUs are slow in bfloat16), and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(TINY_MODEL)


def run_demo(output: str | Path, write: Callable[[str], None], all_rows: bool = False) -> None:
    """Compare methods on held-out text, save the last 70 % sparse model, and reload it. `write` receives every line."""
    start = time.perf_counter()
    more = METHODS | MORE
    methods_at = dict.fromkeys(SPARSITIES, more) | {SAVED: more | BEST} if all_rows else {SAVED: METHODS}
    dense, tokenizer = load_tiny_model()
    duration = "six to eight minutes" if all_rows else "up to two minutes"
    write(BEFORE.format(dense.num_parameters() / 1e6, TEST_WINDOWS, SEQ_LENGTH, duration))
    write(ROW.format("saliency, top-up", "zeros", "perplexity", "x dense", "seconds"))
    reference = _perplexity(dense, tokenizer)
    write(ROW.format("dense model", "0.0%", f"{reference:.2f}", "1.00", ""))
    for sparsity, methods in methods_at.items():
        for label, fields in methods.items():
            model, pruner, seconds = _prune(dense, tokenizer, sparsity, fields)
            perplexity, zeros = _perplexity(model, tokenizer), f"{pruner.report.achieved_sparsity:.1%}"
            write(ROW.format(label, zeros, f"{perplexity:.2f}", f"{perplexity / reference:.2f}", f"{seconds:.1f}"))
            if sparsity == SAVED:
                kept = label, pruner, model
    label, pruner, model = kept
    pruner.save(model.to(torch.bfloat16), output)
    write(f"\nThe {SAVED:.0%} sparse model of {label} is saved in {output}. Plain transformers, in a new process:\n")
    write(_reload(output))
    hint = "" if all_rows else " --all compares more methods, and at 60 and 80 % too."
    write(f"\n{time.perf_counter() - start:.0f} seconds in all.{hint}")


def _prune(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sparsity: float, fields: dict):
    text = str(TINY_MODEL / "calibration.txt")
    pruner = NeuronALPruner(NeuronALConfig(sparsity, dataset=text, seq_length=SEQ_LENGTH, **fields), tokenizer)
    start = time.perf_counter()
    model = pruner.prune(copy.deepcopy(dense))
    return model, pruner, time.perf_counter() - start


def _perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    return evaluate_perplexity(model, tokenizer, str(TINY_MODEL / "heldout.txt"), SEQ_LENGTH, max_windows=TEST_WINDOWS)


def _reload(directory: str | Path) -> str:
    command = [sys.executable, Path(__file__).with_name("reload.py"), directory, PROMPT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"The saved model could not be reloaded: {result.stderr.strip()[-500:]}")
    return result.stdout.rstrip()
