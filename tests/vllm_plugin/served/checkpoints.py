"""Small checkpoints of all kinds, of the demo's model, and what transformers says of tokens."""

from pathlib import Path

import torch
from packed_models import pack
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import optimum_neuronal
from optimum_neuronal import save_pretrained


DEMO = Path(optimum_neuronal.__file__).parent / "demo" / "tiny_model"
ZEROS, PACKED = {"quantization": "optimum_neuronal"}, {"load_format": "optimum_neuronal"}
# Kind -> share of zeros, arguments of `pack` (None: stays dense), arguments of vLLM.
KINDS = {
    "dense": (0.3, None, ZEROS),
    "sparse": (0.3, {}, PACKED),
    "quantized-8-bit-head": (0, {"bits": 4, "embedding_bits": 8}, PACKED),
    "quantized": (0, {"bits": 4}, PACKED),
}


def save(kind: str, folder: Path) -> Path:
    """Save a checkpoint of a kind, with its tokenizer."""
    share, arguments, _ = KINDS[kind]
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "proj" in name and share:
            size = weight.abs().float()
            weight.data[size < size.flatten().quantile(share)] = 0
    if arguments is not None:
        pack(model, **arguments)
    save_pretrained(model, folder, format="dense" if arguments is None else "packed")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@torch.no_grad()
def agreeing(model: nn.Module, prompts: list[list[int]], outputs: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens are transformers' most likely ones after those before them, and how many there are.

    Args:
        model (`nn.Module`): of transformers, perhaps with adapters.
        prompts, outputs (`list[list[int]]`): token ids.

    Tokens are given one by one, as vLLM computes them: with few rows the kernels for codes round activations.
    """
    same = 0
    for prompt, output in zip(prompts, outputs):
        given, cache = prompt, None
        for token in output:
            found = model(torch.tensor([given]), past_key_values=cache, use_cache=True)
            same += int(found.logits[0, -1].argmax()) == token
            given, cache = [token], found.past_key_values
    return same, sum(map(len, outputs))
