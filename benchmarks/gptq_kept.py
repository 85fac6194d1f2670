"""Compare llm-compressor's GPTQ with `benchmarks.gptq`, on one projection and on whole models.

    python -m benchmarks.gptq_kept [--models reference demo DIR ...] [--bits 2 3]

Needs llmcompressor, whose range of transformers versions is narrow: in an environment of its own, with this package beside
it. Both are dense, asymmetric, in groups of 64, with a dampening of 0.01, toward a block's own output, with columns as they
stand or those of the largest inputs first (actorder "static", llm-compressor's default). First the same weight and Hessian
are given to both; then models are quantised. Texts, excess and "calibration KL" are those of `benchmarks.few_bits`.
docs/few_bits.md has what this measured.
"""

import argparse
import copy
import itertools

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.few_bits import HELD_OUT, losses, quantise_as
from benchmarks.gptq import GPTQ
from benchmarks.methods import load
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.demo.run import TINY_MODEL
from optimum_neuronal.model.find_blocks import find_decoder


def differing(bits: int, ordered: bool) -> float:
    """Share of the values of one projection that are not the same, but for the last bits."""
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    own, generator = GPTQ(bits=bits, ordered=ordered), torch.Generator().manual_seed(0)
    weight, mixing = (torch.randn(shape, generator=generator) for shape in ((256, 384), (384, 384)))
    inputs = torch.randn(4096, 384, generator=generator) @ mixing
    hessian = inputs.T @ inputs
    offset, step = own.grid(weight)
    how = QuantizationArgs(
        num_bits=bits, symmetric=False, strategy="group", group_size=own.group, actorder=actorder(ordered)
    )
    zero = offset - 2 ** (bits - 1)  # their codes are signed
    found, _, _ = quantize_weight(weight[None].clone(), hessian[None] / 4096, step[None], zero[None], None, how)
    return float((own.prune(weight, hessian, 0.0) - found[0]).abs().gt(step.amin() / 100).float().mean())


def actorder(ordered: bool) -> str | None:
    return "static" if ordered else None


def told(ordered: bool) -> str:
    return "ordered" if ordered else "in order"


def quantize_kept(model, ids: torch.Tensor, bits: int, ordered: bool) -> None:
    """Gives the projections of a dense model the weights that llm-compressor chooses."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    own = GPTQ(bits=bits)
    weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "group", "group_size": own.group}
    recipe = GPTQModifier(
        config_groups={"all": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        dampening_frac=own.dampening,
        actorder=actorder(ordered),
    )
    rounded = copy.deepcopy(model)
    texts = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)  # asked for, and not used; nor is a model of that name
    rounded.config._name_or_path = str(TINY_MODEL)
    how = {"processor": tokenizer, "num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}
    oneshot(model=rounded, dataset=texts, recipe=recipe, **how)
    found = dict(rounded.named_modules())
    for name, projection in find_decoder(model).projections.items():
        projection.weight.copy_(found[name].weight.data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["reference", "demo"], help="(default: reference demo)")
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3], help="(default: 2 3)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    for bits, ordered in itertools.product(args.bits, (False, True)):
        share = differing(bits, ordered)
        print(f"one projection, {bits} bits, {told(ordered)}: {share:.2%} differ", flush=True)
    header = ["variant", "excess", "calibration KL"]
    for name in args.models:
        dense, ids, tests = load(name)
        ids, heldout = torch.as_tensor(ids)[:-HELD_OUT].long(), torch.as_tensor(ids)[-HELD_OUT:].long()
        before, rows = log_perplexities(dense, tests), []
        for bits, ordered, kept in itertools.product(args.bits, (False, True), (True, False)):
            model = copy.deepcopy(dense)
            if kept:
                quantize_kept(model, ids, bits, ordered)
            else:
                quantise_as(f"int{bits}+block" + ("" if ordered else "+inorder"), model, ids)
            figures = losses(dense, model, before, tests, heldout)
            variant = f"{bits} bits, {told(ordered)}, {'llm-compressor' if kept else 'written out'}"
            rows.append([variant, *(f"{figure:.4f}" for figure in figures)])
            print(" | ".join(rows[-1]), flush=True)
        print(f"\n{name}\n\n{format_markdown(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
