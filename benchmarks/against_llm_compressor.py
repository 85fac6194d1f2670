"""Compare prunes with llm-compressor's, on the same weights, calibration sequences and threads, in turns.

    pip install llmcompressor .
    python -m benchmarks.against_llm_compressor MODEL [--sparsity 0.5] [--num-samples 32] [--seq-length 512]

MODEL is a folder or an id on the Hub. Both run with uniform sparsity and their own defaults. Seconds are those of the whole
prune, without loading the model and drawing the sequences. Perplexity is that of the head of WikiText-2's test text.
"""

import argparse
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner, evaluate_perplexity
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.data.calibration import draw_windows


METHODS = ("wanda", "sparsegpt")
HEADER = ("method", "seconds", "llm-compressor", "ratio", "perplexity", "llm-compressor", "zeros elsewhere")
Prune = Callable[[PreTrainedModel, str, float, torch.Tensor], None]


def prune_here(model: PreTrainedModel, method: str, sparsity: float, ids: torch.Tensor) -> None:
    config = NeuronALConfig(sparsity, method, topup="uniform", num_samples=len(ids), seq_length=ids.shape[1])
    NeuronALPruner(config).prune(model, ids)


def prune_there(model: PreTrainedModel, method: str, sparsity: float, ids: torch.Tensor) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier

    modifier = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}[method]
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    sizes = {"num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}
    options = {"shuffle_calibration_samples": False, "pipeline": "sequential"}
    oneshot(model, dataset=data, recipe=modifier(sparsity=sparsity, ignore=["re:.*lm_head"]), **sizes, **options)


def zeros_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: weight == 0 for name, weight in model.named_parameters() if name.endswith("_proj.weight")}


def share_elsewhere(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the share of elements that are zero in one of two models only."""
    return sum(int((own[name] ^ other[name]).sum()) for name in own) / sum(mask.numel() for mask in own.values())


def compare(
    method: str,
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,
    prunes: tuple[Prune, Prune],
) -> list[str]:
    """Return a row of the table; `prunes` are this package's and the other's."""
    seconds, perplexities, zeros = [], [], []
    for prune in prunes:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        start = time.perf_counter()
        prune(model, method, args.sparsity, ids)
        seconds.append(time.perf_counter() - start)
        zeros.append(zeros_of(model))
        test = (args.evaluate, args.window)
        perplexities.append(evaluate_perplexity(model, tokenizer, *test, max_windows=args.windows))
    times = [f"{value:.1f}" for value in seconds] + [f"{seconds[1] / seconds[0]:.1f}"]
    return [method, *times, *(f"{value:.2f}" for value in perplexities), f"{share_elsewhere(*zeros):.2%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="(default: both)")
    parser.add_argument("--sparsity", type=float, default=0.5, help="(default: 0.5)")
    parser.add_argument("--dataset", default="c4", help="to calibrate with (default: c4)")
    parser.add_argument("--num-samples", type=int, default=32, help="calibration sequences (default: 32)")
    parser.add_argument("--seq-length", type=int, default=512, help="their tokens (default: 512)")
    parser.add_argument("--evaluate", default="wikitext2", help="test text (default: wikitext2)")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a test window (default: 1024)")
    parser.add_argument("--windows", type=int, default=8, help="test windows (default: 8)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    sizes = {"num_samples": args.num_samples, "seq_length": args.seq_length, "seed": 0, "vocab_size": len(tokenizer)}
    ids = draw_windows(args.dataset, tokenizer, **sizes).ids
    rows = [compare(method, args, tokenizer, ids, (prune_here, prune_there)) for method in args.methods]
    print(format_markdown(HEADER, rows))


if __name__ == "__main__":
    main()
