"""The demonstration, which prunes the small model that comes with the package and measures what it loses."""

import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint.saving import save_pruned
from ..checkpoint.writing import SaveOptions
from ..config.neuronal_config import NeuronALConfig
from ..evaluation.answers import answer
from ..evaluation.perplexity import evaluate_perplexity
from ..files.output import check_output
from ..pruner import NeuronALPruner


TINY_MODEL = Path(__file__).parent / "tiny_model"
SEQ_LENGTH, TEST_WINDOWS = 256, 96
SPARSITY = 0.7
METHODS = {  # what is compared -> fields of the config; the first two are the paper's
    "Wanda, uniform": {"saliency": "wanda", "topup": "uniform"},
    "Wanda, NeuronAL": {"saliency": "wanda", "topup": "neuronal", "topup_args": {"variant": "authors"}},
    "ALPS, uniform (default)": {},
}
ROW = "{:<24}  {:>6}  {:>10}  {:>7}  {:>7}"  # a line of the table, written as soon as its model is pruned
BEFORE = """The model: a Llama with {:.1f} M parameters, trained on source code of Python's standard library.
Perplexity: on {} windows of {} tokens of source code that it never saw; lower is better.
The paper's comparison: Wanda with uniform sparsity, and with NeuronAL as its authors ran it. All other rows go beyond it.
This takes up to two minutes on two cores.
"""
PROMPT = "def __init__(self, name, value=None):\n    self.name ="


def load_tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the small Llama that comes with the package, in float32 (CPUs are slow in bfloat16), and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(TINY_MODEL)


def run_demo(output: str | Path, write: Callable[[str], None], overwrite: bool = False) -> None:
    """Compare methods on held-out text, save the last model, and reload it. `write` receives every line."""
    start, target = time.perf_counter(), check_output(output, overwrite, [TINY_MODEL])
    dense, tokenizer = load_tiny_model()
    write(BEFORE.format(dense.num_parameters() / 1e6, TEST_WINDOWS, SEQ_LENGTH))
    write(ROW.format("saliency, top-up", "zeros", "perplexity", "x dense", "seconds"))
    reference = _perplexity(dense, tokenizer)
    write(ROW.format("dense model", "0.0%", f"{reference:.2f}", "1.00", ""))
    text = str(TINY_MODEL / "calibration.txt")
    for label, fields in METHODS.items():
        config = NeuronALConfig(SPARSITY, dataset=text, seq_length=SEQ_LENGTH, **fields)
        began, pruner = time.perf_counter(), NeuronALPruner(config, tokenizer)
        model = pruner.prune(copy.deepcopy(dense))
        seconds, zeros = time.perf_counter() - began, f"{pruner.report.achieved_sparsity:.1%}"
        perplexity = _perplexity(model, tokenizer)
        write(ROW.format(label, zeros, f"{perplexity:.2f}", f"{perplexity / reference:.2f}", f"{seconds:.1f}"))
    save_pruned(model, target, pruner.report, tokenizer, SaveOptions("dense", torch.bfloat16))
    write(
        f"\nThe model of the last row is saved in {output}. AutoModelForCausalLM loads it as any other. It continues a prompt:\n"
    )
    saved = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    saved.generation_config.no_repeat_ngram_size = 4
    write(PROMPT + answer(saved, tokenizer, PROMPT, 48))
    write(f"\n{time.perf_counter() - start:.0f} seconds in all.")


def _perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    return evaluate_perplexity(model, tokenizer, str(TINY_MODEL / "heldout.txt"), SEQ_LENGTH, max_windows=TEST_WINDOWS)
