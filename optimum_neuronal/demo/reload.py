"""Reloads a pruned model as a user of plain transformers does. `run.py` starts it by its path, without this package."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def reload(directory: str, prompt: str) -> str:
    """Return the share of zeros in a saved model, and its continuation of a prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    weights = [p for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    zeros = sum((p == 0).sum().item() for p in weights) / sum(p.numel() for p in weights)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, max_new_tokens=48, do_sample=False, no_repeat_ngram_size=4)[0]
    return f"{zeros:.2%} of the projections' weights are zero. It goes on:\n{tokenizer.decode(tokens)}"


if __name__ == "__main__":
    sys.stdout.write(reload(*sys.argv[1:]))
