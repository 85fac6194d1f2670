"""Measure tokens per second and memory of quantised weights, beside bf16, sparse bf16, and torchao's int8 and int4, in turns.

    python -m benchmarks.few_bits_speed [--shape 1b 3b] [--rows "packed 70%" ...] [--tokens 8] [--rounds 5]

One sequence, one thread, `generate`; the clock counts the process's own time, so that what else the machine does is not
in it (that others use its caches and its bandwidth is). Shapes are those of `benchmarks.decoding`. Every block of a model
holds the same random numbers, each in memory of its own; the dense head, tied to the embeddings, is the same tensor for
all models. torchao's int8 is timed as `generate` calls it and with its layers compiled. Memory is what the process grew
by with the blocks of a model. docs/few_bits.md has what this measured.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.decoding import SHAPES, VOCABULARY
from optimum_neuronal import sparsify
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.common.machine import hand_back_freed, resident_memory
from optimum_neuronal.evaluation.quantized import has_torchao, quantize
from optimum_neuronal.evaluation.speed import decode_seconds


def one_block(shape: str, sparsity: float = 0.0) -> LlamaForCausalLM:
    """A model of one block in bfloat16 with random projections, of which so many weights are zero, and a small vocabulary."""
    shared = {"num_key_value_heads": 8, "max_position_embeddings": 4096, "vocab_size": 8, "dtype": "bfloat16"}
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPES[shape], "num_hidden_layers": 1, **shared})).eval().bfloat16()
    generator = torch.Generator().manual_seed(0)
    for name in projections(model):
        weight = model.get_submodule(name).weight.data
        weight.uniform_(-0.03, 0.03, generator=generator)
        weight.masked_fill_(torch.rand(weight.shape, generator=generator) < sparsity, 0)
    return model


def projections(model: LlamaForCausalLM) -> list[str]:
    """Names of the linear layers of the blocks."""
    return [name for name, _ in model.named_modules() if name.endswith("_proj")]


def stacked(model: LlamaForCausalLM, shape: str, head: torch.nn.Parameter) -> LlamaForCausalLM:
    """The model with as many blocks as its shape has, copies of the first, and with a head that is its embedding too."""
    blocks, config = model.model.layers, model.config
    for index in range(1, SHAPES[shape]["num_hidden_layers"]):
        block = copy.deepcopy(blocks[0])
        block.self_attn.layer_idx = index
        blocks.append(block)
    config.num_hidden_layers, config.vocab_size, config.layer_types = len(blocks), len(head), None
    model.model.embed_tokens.weight = model.lm_head.weight = head
    return model


def compiled(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with its projections compiled, each on its own."""
    torch._dynamo.config.recompile_limit = 64  # one for each shape, and for one and several tokens
    for name in projections(model):
        model.get_submodule(name).compile()
    return model


def quantized(shape: str, form: str) -> LlamaForCausalLM:
    """A dense block, quantised by torchao."""
    model = one_block(shape)
    return quantize(model, projections(model), form)


ROWS: dict[str, Callable[[str], LlamaForCausalLM]] = {
    "dense": one_block,
    "packed 70%": lambda shape: sparsify(one_block(shape, 0.7)),
    "4 bits": lambda shape: sparsify(one_block(shape), bits=4),
    "3 bits": lambda shape: sparsify(one_block(shape), bits=3),
    "2 bits": lambda shape: sparsify(one_block(shape), bits=2),
    "torchao int8": lambda shape: quantized(shape, "torchao int8"),
    "torchao int8, compiled": lambda shape: quantized(shape, "torchao int8"),
    "torchao int4": lambda shape: quantized(shape, "torchao int4"),
}


def build(shape: str, rows: list[str]) -> tuple[dict[str, LlamaForCausalLM], dict[str, int]]:
    """The models by row, and what the process grew by with the blocks of each."""
    head = torch.empty(VOCABULARY, SHAPES[shape]["hidden_size"], dtype=torch.bfloat16).uniform_(-0.03, 0.03)
    head = torch.nn.Parameter(head, requires_grad=False)
    models, grown = {}, {}
    for row in rows:
        model = ROWS[row](shape)
        count = SHAPES[shape]["num_hidden_layers"]
        hand_back_freed()
        before = resident_memory()
        models[row] = stacked(model, shape, head)
        hand_back_freed()
        grown[row] = (resident_memory() - before) * count // (count - 1)  # the first was there before
        if row.endswith("compiled"):
            compiled(models[row])
    return models, grown


def measure(models: dict[str, LlamaForCausalLM], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds a token of every model, by round; one round more goes before, to warm up and to compile."""
    seconds: dict[str, list[float]] = {row: [] for row in models}
    for number in range(rounds + 1):
        for row, model in models.items():
            with inference(model):
                found = decode_seconds(model, 1, tokens if number else 1, time.process_time) / tokens
            if number:
                seconds[row].append(found)
            print(f"round {number}, {row}: {found:.3f} s", flush=True)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b"], help="(default: 1b)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="(default: all)")
    parser.add_argument("--tokens", type=int, default=8, help="a round (default: 8)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = [row for row in args.rows if has_torchao() or not row.startswith("torchao")]
    for shape in args.shape:
        models, grown = build(shape, rows)
        seconds = measure(models, args.tokens, args.rounds)
        dense, table = seconds[rows[0]], []
        for row in rows:
            ratios = [one / other for one, other in zip(dense, seconds[row])]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            memory = f"{grown[row] / 1e9:.2f} GB", f"{grown[row] / grown[rows[0]]:.2f}"
            table.append([row, f"{1 / statistics.median(seconds[row]):.2f}", spread, *memory])
        header = [f"{shape} shapes", "tokens per second", "times", "projections", "times"]
        print(f"\n{format_markdown(header, table)}\n", flush=True)
        del models


if __name__ == "__main__":
    main()
