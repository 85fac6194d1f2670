"""What a user of the Hub does, in a process whose endpoint is a stand-in from the start. Writes what came out as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
from conftest import make_model, make_tokenizer
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, inspect_checkpoint
from optimum_neuronal.checkpoint.hub import check_push
from optimum_neuronal.packed.packed_module import packed_modules


outcome, TEXT = {}, "w1 w2 w3 w4 w5 w6 w7 w8 " * 80


def pruned(sparsity=0.7, **fields):
    model = make_model("llama", vocab_size=256)
    model.config._name_or_path = "me/dense-llama"
    config = NeuronALConfig(sparsity, saliency="wanda", topup="uniform", num_samples=8, seq_length=8, seed=3, **fields)
    pruner = NeuronALPruner(config, make_tokenizer())
    pruner.prune(model, [TEXT])
    pruner.report.evaluation["wikitext2"] = {"dense": 12.3456, "pruned": 23.4567}
    return pruner, model


def same(model, repo_id, **keywords):
    reloaded = AutoModelForCausalLM.from_pretrained(repo_id, **keywords)
    return all(torch.equal(value, reloaded.state_dict()[key]) for key, value in model.state_dict().items())


def error(work, *arguments, **keywords):
    try:
        work(*arguments, **keywords)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return None


pruner, model = pruned()
outcome["url"] = pruner.push_to_hub(model, "me/llama-70", private=True)
outcome["reloaded"] = same(model, "me/llama-70")
found = inspect_checkpoint("me/llama-70")
outcome["inspected"] = [found.pruned, found.problems, found.total.sparsity == pruner.report.achieved_sparsity]
outcome["not found"] = error(inspect_checkpoint, "me/absent")

packed_pruner, packed = pruned()
packed_pruner.tokenizer.chat_template = {"default": "{{ messages }}", "tool": "{{ tools }}"}
packed_pruner.push_to_hub(packed, "me/packed", format="packed", commit_message="Packed", token="hf_other")
computing = AutoModelForCausalLM.from_pretrained("me/packed", token="hf_other")
outcome["packed modules"] = len(list(packed_modules(computing)))
outcome["packed inspected"] = inspect_checkpoint("me/packed").format
converted = convert_checkpoint("me/packed", "dense", Path(sys.argv[1]).with_name("converted"))
outcome["converted"] = [same(packed, converted), sorted(path.name for path in converted.iterdir())]

other_pruner, other = pruned(0.5)
HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="notes/mine.txt", repo_id="me/packed")
outcome["refused"] = [
    error(check_push, "packed"),
    error(other_pruner.push_to_hub, other, "me/packed"),
    error(check_push, "me/dense-llama"),
]
outcome["allowed"] = error(check_push, "me/packed", overwrite=True)
other_pruner.push_to_hub(other, "me/packed", commit_message="Dense now", overwrite=True)
outcome["other format"] = [same(other, "me/packed"), inspect_checkpoint("me/packed").format]
other_pruner.push_to_hub(other, "me/llama-70", revision="trial")
outcome["branches"] = [same(other, "me/llama-70", revision="trial"), same(model, "me/llama-70")]
outcome["branch again"] = error(other_pruner.push_to_hub, other, "me/llama-70", revision="trial")
other_pruner.push_to_hub(other, "me/new-and-empty")

outcome["may push"] = [error(check_push, name) for name in ("fresh", "lab/fresh")]
rejected = {"not/an/id": None, "else/fresh": None, "library/fresh": None, "me/x": "hf_read", "me/y": "hf_unknown"}
outcome["may not push"] = [error(check_push, name, token) for name, token in rejected.items()]

del os.environ["HF_TOKEN"]
outcome["check without token"] = error(check_push, "me/llama-70")
outcome["push without token"] = error(pruner.push_to_hub, model, "me/llama-70")
Path(sys.argv[1]).write_text(json.dumps(outcome))
