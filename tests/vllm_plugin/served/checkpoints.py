"""Small checkpoints of the demo's model, and what transformers says of tokens."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import optimum_neuronal
from optimum_neuronal import save_pretrained


DEMO = Path(optimum_neuronal.__file__).parent / "demo" / "tiny_model"
ZEROS, PACKED = {"quantization": "optimum_neuronal"}, {"load_format": "optimum_neuronal"}
KINDS = {"dense": ZEROS, "packed": PACKED}  # format of the checkpoint -> arguments of vLLM


def save(kind: str, folder: Path) -> Path:
    """Save a checkpoint with zeros and its tokenizer. The head of a packed one is packed too, so it is not tied."""
    tied = kind == "dense"
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16, tie_word_embeddings=tied)
    if not tied:
        model.lm_head.weight.data.copy_(model.get_input_embeddings().weight)
    for name, weight in model.named_parameters():
        if "proj" in name or "lm_head" in name:
            size = weight.abs().float()
            weight.data[size < size.flatten().quantile(0.3)] = 0
    save_pretrained(model, folder, format=kind)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


@torch.no_grad()
def agreeing(model: nn.Module, prompts: list[list[int]], outputs: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens are transformers' most likely ones after those before them, and how many there are.

    Args:
        model (`nn.Module`): of transformers, perhaps with adapters.
        prompts, outputs (`list[list[int]]`): token ids.
    """
    same = 0
    for prompt, output in zip(prompts, outputs):
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        same += int((logits.argmax(-1) == torch.tensor(output)).sum())
    return same, sum(map(len, outputs))
