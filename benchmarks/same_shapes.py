"""Llama models of one shape with random weights, dense and packed, whose blocks are copies of one block."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimum_neuronal import sparsify
from optimum_neuronal.evaluation.quantized import footprint
from optimum_neuronal.packed.formats.quantized import QuantizedWeight
from optimum_neuronal.packed.packed_linear import PackedLinear


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama model; the defaults are those of Llama-3.2-1B but for the vocabulary."""

    layers: int = 16
    vocabulary: int = 512
    hidden: int = 2048
    intermediate: int = 8192
    heads: int = 32
    key_value_heads: int = 8
    head_size: int = 64

    def projections(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a block's projections, by their names in a GGUF file."""
        hidden, queries, keys = self.hidden, self.heads * self.head_size, self.key_value_heads * self.head_size
        up, down = (self.intermediate, hidden), (hidden, self.intermediate)
        attention = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        return attention | {"attn_output": (hidden, queries), "ffn_gate": up, "ffn_up": up, "ffn_down": down}

    @property
    def weights(self) -> int:
        """Number of weights in all projections."""
        return self.layers * sum(rows * columns for rows, columns in self.projections().values())


# What turns a dense model of one block into the one to time.
PACKED: dict[str, Callable[[LlamaForCausalLM], LlamaForCausalLM]] = {
    "dense, bf16": lambda model: model,
    "70 % sparse, bf16": lambda model: sparsify(zeroed(model, 0.7)),
    "2.4 bits": lambda model: quantised(model, 2, {"down_proj": 3, "o_proj": 3, "k_proj": 3, "v_proj": 3}),
    "3 bits": lambda model: quantised(model, 3),
    "4 bits": lambda model: quantised(model, 4),
}


def projections(model: LlamaForCausalLM) -> list[torch.nn.Module]:
    """The linear layers of the blocks, dense or packed."""
    return [module for name, module in model.named_modules() if name.endswith("_proj")]


def zeroed(model: LlamaForCausalLM, sparsity: float) -> LlamaForCausalLM:
    """The model, with a share of zeros at random places of its projections."""
    generator = torch.Generator().manual_seed(1)
    for module in projections(model):
        weight = module.weight.data
        weight.masked_fill_(torch.rand(weight.shape, generator=generator) < sparsity, 0)
    return model


def quantised(model: LlamaForCausalLM, bits: int, others: Mapping[str, int] | None = None) -> LlamaForCausalLM:
    """The model with dense projections of so many bits; `others` has the bits of some, by the end of their names."""
    for name, module in list(model.named_modules()):
        if name.endswith("_proj"):
            parent, _, own = name.rpartition(".")
            weight = QuantizedWeight.nearest(module.weight.data, (others or {}).get(own, bits))
            setattr(model.get_submodule(parent), own, PackedLinear(weight))
    return model


def make_model(kind: str, shape: Shape) -> LlamaForCausalLM:
    """A model in bfloat16 whose packed weights are of a kind of `PACKED`, and whose embedding is its head, too."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).eval().bfloat16()
    generator = torch.Generator().manual_seed(0)
    for module in projections(model):
        module.weight.data.uniform_(-0.03, 0.03, generator=generator)
    model = PACKED[kind](model)
    blocks = model.model.layers
    for index in range(1, shape.layers):
        block = copy.deepcopy(blocks[0])
        block.self_attn.layer_idx = index
        blocks.append(block)
    config.num_hidden_layers, config.layer_types = shape.layers, None
    return model


def projection_bytes(model: LlamaForCausalLM) -> int:
    """Bytes of the projections."""
    return sum(footprint(module) for module in projections(model))


@torch.inference_mode()
def projection_seconds(
    model: LlamaForCausalLM, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of all projections for one token, without all else of the model; a pass before it warms up."""
    modules = projections(model)
    inputs = {size: torch.randn(1, size, dtype=torch.bfloat16) for size in {one.in_features for one in modules}}
    calls = [(module, inputs[module.in_features]) for module in modules]
    start = 0.0
    for repeat in range(repeats + 1):
        if repeat == 1:
            start = clock()
        for module, x in calls:
            module(x)
    return (clock() - start) / repeats
