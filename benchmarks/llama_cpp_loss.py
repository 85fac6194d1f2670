"""Measure what llama.cpp's types lose on a trained Llama, beside what this package quantises to as many bytes.

    pip install -e ".[benchmarks-llama]"
    python -m benchmarks.llama_cpp_loss --llama-cpp DIR [--model reference] [--types Q4_0 Q2_K ...]

llama-quantize says which type each projection gets, and llama.cpp's library quantises it: with an importance for each
column, the mean square of its inputs over the calibration sequences, as llama.cpp's imatrix has it ("plain": without). The
values are put back into the model, which transformers runs. So only the projections lose, and no kernel of llama.cpp rounds
activations. Most types hold blocks of 256 columns. Neighbouring rows of a narrower model are joined, so that it gets the types
that a wide one would get. docs/few_bits.md has what this measured.
"""

import argparse
import copy
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers.utils import logging

from benchmarks.efforts import log_perplexities
from benchmarks.gguf_models import Quantizer, Types, write_model
from benchmarks.gguf_types import planned_types
from benchmarks.methods import load
from benchmarks.same_shapes import Shape
from optimum_neuronal.common.display import format_table


NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
WIDE = Shape(hidden=256, intermediate=768, heads=4, key_value_heads=4)  # whose types depend on the layers alone
BLOCK = 256  # columns that a type quantises together
TYPES = ("Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ2_XS", "IQ2_XXS")


def projections(model) -> dict[str, torch.nn.Linear]:
    """Return a GGUF file's name of each projection -> the layer."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            own, block = name.rpartition(".")[2].removesuffix("_proj"), name.split(".")[2]
            found[f"blk.{block}.{NAMES[own]}.weight"] = module
    return found


@torch.no_grad()
def importances(model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the mean square of each column's inputs, by the projections' names."""
    sums, handles = {}, []
    for name, module in projections(model).items():

        def add(module, args, name=name):
            sums[name] = sums.get(name, 0) + args[0].double().square().flatten(0, -2).sum(0)

        handles.append(module.register_forward_pre_hook(add))
    for batch in ids.split(8):
        model(batch)
    for handle in handles:
        handle.remove()
    return {name: (total / ids.numel()).float().numpy() for name, total in sums.items()}


def quantise(model, plan: dict[str, str], quantizer: Quantizer, importance: dict[str, np.ndarray]) -> float:
    """Round a model's projections in place to the types of a plan. Return bits per weight."""
    size = count = 0
    for name, module in projections(model).items():
        kind = Types[plan.get(name, "bf16").upper()]
        weight = module.weight.detach()
        joined = BLOCK // math.gcd(BLOCK, weight.shape[1])  # rows
        wide = weight.view(-1, joined * weight.shape[1]).numpy()
        given = np.tile(importance[name], joined) if name in importance else None
        data = quantizer.quantise(kind, wide, given)
        module.weight.data = torch.from_numpy(gguf.quants.dequantize(data, kind)).view(weight.shape)
        size, count = size + data.nbytes, count + module.weight.numel()
    return 8 * size / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-cpp", type=Path, required=True, metavar="DIR", help="folder of llama.cpp's programs")
    parser.add_argument("--model", default="reference", help="reference, or a directory (default: reference)")
    parser.add_argument("--types", nargs="+", default=TYPES, help=f"(default: {' '.join(TYPES)})")
    args = parser.parse_args()
    logging.disable_progress_bar()
    dense, ids, tests = load(args.model)
    before, quantizer = log_perplexities(dense, tests), Quantizer(args.llama_cpp)
    importance, rows = importances(dense, torch.as_tensor(ids).long()), []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "BF16.gguf"
        write_model(plain, replace(WIDE, layers=dense.config.num_hidden_layers), quantizer, {})
        for kind in args.types:
            plan = planned_types(args.llama_cpp, plain, kind)
            for how, given in (("importance", importance), ("plain", {})):
                model = copy.deepcopy(dense)
                try:
                    bits = quantise(model, plan, quantizer, given)
                except ValueError as error:
                    print(f"{kind}, {how}: {error}")
                    continue
                excess = [after - own for after, own in zip(log_perplexities(model, tests), before)]
                rows.append([f"{kind}, {how}", f"{bits:.2f}", f"{sum(excess) / len(excess):.4f}"])
                print(" | ".join(rows[-1]), flush=True)
    print(f"\n{args.model}\n\n{format_table(['type', 'bits per weight', 'excess'], rows)}")


if __name__ == "__main__":
    main()
