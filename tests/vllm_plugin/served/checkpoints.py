"""Small checkpoints of all kinds, of the demo's model, and what transformers says of tokens."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import optimum_neuronal
from optimum_neuronal import SparseModelForCausalLM, save_pretrained, sparsify


DEMO = Path(optimum_neuronal.__file__).parent / "demo" / "tiny_model"
ZEROS, PACKED = {"quantization": "optimum_neuronal"}, {"load_format": "optimum_neuronal"}
# Kind -> share of zeros, arguments of sparsify (None: stays dense), arguments of vLLM.
KINDS = {
    "dense": (0.3, None, ZEROS),
    "sparse": (0.3, {}, PACKED),
    "quantised-8-bit-head": (0, {"bits": 4, "embedding_bits": 8}, PACKED),
    "quantised": (0, {"bits": 4}, PACKED),
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
        sparsify(model, **arguments)
    save_pretrained(model, folder, format="dense" if arguments is None else "packed")
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return folder


def agreeing(folder: Path, prompts: list[list[int]], outputs: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens are transformers' most likely ones after those before them, and how many there are."""
    model = SparseModelForCausalLM.from_pretrained(folder)
    found = 0
    for prompt, output in zip(prompts, outputs):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        found += int((logits.argmax(-1)[len(prompt) - 1 : -1] == torch.tensor(output)).sum())
    return found, sum(map(len, outputs))
