"""Measure the cost of int8 activations: divergence of packed models from dense computation, one token at a time.

    python -m benchmarks.activations [--sequences 8] [--bits 4 3]

The demo's model, 60 %, ALPS with uniform sparsity, on its held-out text, in float32: every token is read alone, with a
cache, so that the kernels of decoding compute it. docs/few_bits.md has what this measured.
"""

import argparse
import copy
import sys

import torch
from transformers.utils import logging

from benchmarks.methods import load
from optimum_neuronal import NeuronALConfig, NeuronALPruner, sparsify
from optimum_neuronal.display import format_markdown


@torch.no_grad()
def read_by_tokens(model, ids: torch.Tensor) -> torch.Tensor:
    """Logarithms of the next-token probabilities of sequences, one after the other: shape (*ids.shape, vocabulary)."""
    found = []
    for sequence in ids.split(1):
        cache, logits = None, []
        for token in sequence.split(1, dim=1):
            output = model(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits)
        found.append(torch.cat(logits, dim=1).log_softmax(-1))
    return torch.cat(found)


def compared(expected: torch.Tensor, found: torch.Tensor, ids: torch.Tensor) -> list[str]:
    """Divergence from the expected distributions, by how much the text's negative log-likelihood rises, equal choices."""
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    rise = [-log[:, :-1].gather(-1, ids[:, 1:, None]).mean() for log in (expected, found)]
    alike = (expected.argmax(-1) == found.argmax(-1)).float().mean()
    return [f"{divergence:.1e}", f"{rise[1] - rise[0]:+.1e}", f"{alike:.2%}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8, help="of held-out text (default: 8)")
    parser.add_argument("--bits", nargs="+", type=int, default=[4, 3], help="of the values (default: 4 3)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    dense, ids, tests = load("demo")
    text = next(iter(tests.values()))[: args.sequences]
    rows = []
    for bits in args.bits:
        model = copy.deepcopy(dense)
        config = NeuronALConfig(0.6, topup="uniform", dataset=None, num_samples=len(ids), value_bits=bits)
        NeuronALPruner(config).prune(model, torch.as_tensor(ids))
        expected = read_by_tokens(model.eval(), text)
        for activations in ("int8", "bf16"):
            packed = sparsify(copy.deepcopy(model), value_bits=bits, activations=activations)
            rows.append([str(bits), activations, *compared(expected, read_by_tokens(packed, text), text)])
    header = ["bits of values", "activations", "divergence, nats a token", "rise of the loss", "same first choice"]
    sys.stdout.write(format_markdown(header, rows) + "\n")


if __name__ == "__main__":
    main()
