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
METHODS = {  # what is compared -> fields of the config
    "Wanda, uniform": {"saliency": "wanda", "topup": "uniform"},
    "Wanda, NeuronAL": {"saliency": "wanda", "topup": "neuronal"},
    "ALPS, search (default)": {},
}
MORE = {  # compared with --all
    "magnitude, uniform": {"saliency": "magnitude", "topup": "uniform"},
    "Wanda, search": {"saliency": "wanda", "topup": "search"},
}
BEST = {"preset best": PRESETS["best"]}  # takes minutes

ROW = "{:<22}  {:>6}  {:>10}  {:>7}  {:>7}"  # a line of the table, written as soon as its prune is finished
DURATIONS = {False: "up to two minutes", True: "six to eight minutes"}  # all_rows -> time on two cores

# Run in a process of its own, which never imports this package: what a user of plain transformers sees.
RELOAD = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
weights = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
zeros = sum((p == 0).sum().item() for p in weights) / sum(p.numel() for p in weights)
assert "optimum_neuronal" not in sys.modules
print(f"{zeros:.2%} of the projections' weights are zero. It goes on:")
inputs = tokenizer(sys.argv[2], return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=48, do_sample=False, no_repeat_ngram_size=4)[0]))
"""
PROMPT = "def __init__(self, name, value=None):\n    self.name ="


def load_tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the small Llama that comes with the package, in float32 (CPUs are slow in bfloat16), and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(TINY_MODEL)


def run_demo(output: str | Path, write: Callable[[str], None], all_rows: bool = False) -> None:
    """Compare methods on held-out text, save the last 70 % sparse model, and reload it in a new process.

    `write` receives every line of text. `all_rows` compares more methods, and at 60, 70 and 80 %.
    """
    start = time.perf_counter()
    methods_at = {SAVED: METHODS}
    if all_rows:
        methods_at = dict.fromkeys(SPARSITIES, METHODS | MORE) | {SAVED: METHODS | MORE | BEST}
    dense, tokenizer = load_tiny_model()
    size = f"{dense.num_parameters() / 1e6:.1f} M parameters"
    write(f"The model: a Llama with {size}, trained on source code of Python's standard library.")
    write("Perplexity: on source code that it never saw; lower is better.")
    write(f"This takes {DURATIONS[all_rows]} on two cores.\n")
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
    more = "" if all_rows else " --all compares more methods, and at 60 and 80 % too."
    write(f"\n{time.perf_counter() - start:.0f} seconds in all.{more}")


def _prune(dense: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sparsity: float, fields: dict):
    config = NeuronALConfig(
        sparsity=sparsity, dataset=str(TINY_MODEL / "calibration.txt"), seq_length=SEQ_LENGTH, **fields
    )
    pruner = NeuronALPruner(config, tokenizer)
    start = time.perf_counter()
    model = pruner.prune(copy.deepcopy(dense))
    return model, pruner, time.perf_counter() - start


def _perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    heldout = TINY_MODEL / "heldout.txt"
    return evaluate_perplexity(model, tokenizer, str(heldout), SEQ_LENGTH, max_windows=TEST_WINDOWS)


def _reload(directory: str | Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", RELOAD, str(directory), PROMPT], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(f"The saved model could not be reloaded: {result.stderr.strip()[-500:]}")
    return result.stdout.rstrip()
