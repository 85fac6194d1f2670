"""Measure tokens per second of whole models alternately with packed and with dense weights.

    python -m benchmarks.decoding [--shape 1b 3b 8b-stack] [--sparsity 0.7] [--threads 2] [--rounds 5]

Weights are random: speed depends only on how many are zero. Shapes are those of Llama-3.2-1B and 3B, and as many blocks of
Llama-3.1-8B as fit (`8b-stack`).
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from benchmarks.shared import zero_randomly
from optimum_neuronal import sparsify
from optimum_neuronal.evaluation.speed import measure_speed


SHAPES = {
    "1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, head_dim=64),
    "3b": dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, head_dim=128),
    "8b-stack": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32, head_dim=128),
}  # fmt: skip
VOCABULARY = 128256


def two_models(shape: str, sparsity: float) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return a random model in bfloat16, and the same model packed; all other weights are shared."""
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        dense, packed = (LlamaForCausalLM(config).eval().bfloat16() for _ in range(2))
    rotary = LlamaForCausalLM(
        LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8})
    ).model.rotary_emb
    dense.to_empty(device="cpu")
    for parameter in dense.parameters():
        parameter.data.uniform_(-0.03, 0.03, generator=generator)
    zero_randomly(dense, sparsity)
    packed.load_state_dict(dense.state_dict(), assign=True)
    for model in (dense, packed):
        model.tie_weights()
        model.model.rotary_emb = rotary  # its frequencies are in no state dict
    return dense, sparsify(packed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1b", "3b"], help="(default: 1b 3b)")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.7], help="(default: 0.7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: as torch decides)")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8], help="(default: 1 4 8)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prefill (default: 512)")
    parser.add_argument("--new-tokens", type=int, default=16, help="(default: 16)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    for shape in args.shape:
        for sparsity in args.sparsity:
            dense, packed = two_models(shape, sparsity)
            report = measure_speed(dense, packed, args.batches, args.prompt_tokens, args.new_tokens, args.rounds)
            print(f"\n{shape} shapes, {sparsity:.0%} zeros: {report}\n", flush=True)
            del dense, packed


if __name__ == "__main__":
    main()
