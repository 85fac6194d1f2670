"""Compare NeuronAL's time (both steps, 14 + 15 lambdas, 8 sequences) with the order of work of the authors' code.

    python -m benchmarks.search [--threads 1] [--rounds 3]

The authors' repository needs releases of its own, so its order of work is written out here: every candidate visits all
blocks by itself; at each block every sequence runs alone, dense and then sparse, with a hook on every projection that
takes norm, mean, variance and sum of its inputs; every mask comes from a stable sort. Both run in turns on the
reference model, so the ratio is one of the same machine at the same time. Their own code was once timed there at 25 s
on one thread.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers.utils import logging

from optimum_neuronal.blocks.block_inputs import capture_inputs, inference
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup.neuronal import NeuronAL
from tests import authors
from tests.sweeps import build_sweep


SEQUENCES, CANDIDATES, SPARSITY = 8, 14 + 15, 0.7


def authors_forward(block, hidden, call):
    """One sequence at a time, a hook on every projection: running norm, mean, variance and sum of its inputs."""
    norms = {name: torch.zeros(p.shape[1]) for name, p in block.projections.items()}
    means, variances, sums = ({name: torch.zeros_like(value) for name, value in norms.items()} for _ in range(3))
    counts = dict.fromkeys(norms, 0)

    def hook(name):
        def observe(_module, inputs, _output):
            tokens = inputs[0][0].t().float()
            norms[name] *= counts[name] / (counts[name] + 1)
            counts[name] += 1
            norms[name] += torch.norm(tokens, p=2, dim=1) ** 2 / counts[name]
            for statistic, now in (
                (means, tokens.mean(dim=1)),
                (variances, tokens.var(dim=1, unbiased=False)),
                (sums, tokens.sum(dim=1)),
            ):
                statistic[name] += (now - statistic[name]) / counts[name]

        return observe

    handles = [p.module.register_forward_hook(hook(name)) for name, p in block.projections.items()]
    hidden, outputs = hidden.clone(), torch.zeros_like(hidden)
    for index, sequence in enumerate(hidden):
        outputs[index] = block.module(sequence[None], *call.args, **call.kwargs)[0]
    for handle in handles:
        handle.remove()
    return outputs, {name: value.sqrt() for name, value in norms.items()}


def authors_candidate(decoder, hidden, calls) -> float:
    score = 0.0
    for block, (call,) in zip(decoder.blocks, calls):
        _, dense = authors_forward(block, hidden, call)
        weights = {name: p.module.weight.data.clone() for name, p in block.projections.items()}
        for name, projection in block.projections.items():
            saliency = projection.weight.abs() * dense[name]
            order = torch.sort(saliency, dim=-1, stable=True).indices[:, : int(saliency.shape[1] * SPARSITY)]
            projection.weight[torch.zeros_like(saliency, dtype=torch.bool).scatter_(1, order, True)] = 0
        hidden, sparse = authors_forward(block, hidden, call)
        for name, projection in block.projections.items():
            projection.module.weight.data = weights[name]
            difference = dense[name] / dense[name].sum() - sparse[name] / sparse[name].sum()
            score += difference.norm().item() / difference.numel()
    return score


def measure_theirs(model, ids) -> float:
    start = time.perf_counter()
    with inference(model):
        decoder = find_decoder(model)
        inputs = capture_inputs(decoder, ids[:SEQUENCES], SEQUENCES, ids.device)
        single = capture_inputs(decoder, ids[:1], 1, ids.device).calls
        for _ in range(CANDIDATES):
            authors_candidate(decoder, inputs.hidden[0], single)
    return time.perf_counter() - start


def measure_ours(model, ids) -> float:
    start = time.perf_counter()
    with inference(model):
        sweep = build_sweep(find_decoder(model), SALIENCIES.get("wanda")(), ids, SEQUENCES, SEQUENCES)
        NeuronAL().allocate(sweep, SPARSITY)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of both, of which the median counts (default: 3)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    model, ids = authors.load_model(), authors.load_ids("calibration_ids")
    ours, theirs = [], []
    for turn in range(args.rounds):
        ours.append(measure_ours(model, ids))
        theirs.append(measure_theirs(model, ids))
        print(f"turn {turn + 1}: ours {ours[-1]:.1f} s, the authors' order of work {theirs[-1]:.1f} s", flush=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    print(
        f"{Path(__file__).name}, {args.threads} thread(s): {ratio:.2f} of the authors' time (median of {args.rounds})"
    )


if __name__ == "__main__":
    main()
