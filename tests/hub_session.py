"""What a user of the Hub does, in a process whose endpoint is a stand-in from the start. Writes what came out as JSON."""

import json
import os
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import torch
from conftest import make_model, make_tokenizer
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import get_session
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    convert_checkpoint,
    inspect_checkpoint,
)
from optimum_neuronal.checkpoint.hub import check_push


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


def break_uploads(count):
    urllib.request.urlopen(f"{os.environ['HF_ENDPOINT']}/_test/uploads/{count}").close()


pruner, model = pruned()
outcome["url"] = pruner.push_to_hub(model, "me/llama-70", private=True)
outcome["reloaded"] = same(model, "me/llama-70")
# What ModelCard.validate() does; early releases ask huggingface.co, whatever the endpoint.
card = {"repoType": "model", "content": str(ModelCard.load("me/llama-70"))}
outcome["card"] = get_session().post(f"{os.environ['HF_ENDPOINT']}/api/validate-yaml", json=card).status_code
found = inspect_checkpoint("me/llama-70")
outcome["inspected"] = [found.pruned, found.problems, found.total.sparsity == pruner.report.achieved_sparsity]

model.push_to_hub("me/by-transformers")
outcome["by transformers"] = same(model, "me/by-transformers")

outcome["not found"] = error(inspect_checkpoint, "me/absent")

packed_pruner, packed = pruned()
packed_pruner.push_to_hub(packed, "me/packed", format="packed", commit_message="Packed", token="hf_other")
outcome["packed reloaded"] = same(packed, "me/packed")
outcome["packed inspected"] = inspect_checkpoint("me/packed").format

computing = SparseModelForCausalLM.from_pretrained("me/packed", token="hf_other")
outcome["packed modules"] = [computing.packing.packed, computing.config.name_or_path]
computing.push_to_hub("me/pushed-packed")
outcome["packed modules pushed"] = same(packed, "me/pushed-packed")

text = Path(sys.argv[1]).with_name("text.txt")
text.write_text(TEXT)
dense, config = make_model("llama", vocab_size=256), replace(pruner.config, dataset=str(text))
for part in (dense, make_tokenizer()):
    part.push_to_hub("me/dense")
at_load = AutoModelForCausalLM.from_pretrained("me/dense", quantization_config=config, revision="main").state_dict()
expected = NeuronALPruner(config, make_tokenizer()).prune(dense).state_dict()
outcome["pruned at load"] = all(torch.equal(value, at_load[name]) for name, value in expected.items())

converted = convert_checkpoint("me/packed", "dense", Path(sys.argv[1]).with_name("converted"))
outcome["converted"] = [same(packed, converted), sorted(path.name for path in converted.iterdir())]

other_pruner, other = pruned(0.5)
other_pruner.push_to_hub(other, "me/llama-70", commit_message="Less sparse")
outcome["changed"] = [same(other, "me/llama-70"), same(model, "me/llama-70")]
other_pruner.push_to_hub(other, "me/packed", commit_message="Dense now")
outcome["other format"] = [same(other, "me/packed"), inspect_checkpoint("me/packed").format]

pruner.push_to_hub(model, "me/llama-70", revision="trial")
outcome["branches"] = [same(model, "me/llama-70", revision="trial"), same(other, "me/llama-70")]
outcome["branch inspected"] = inspect_checkpoint("me/llama-70", revision="trial").sparsity_config["sparsity"]

time.sleep = lambda seconds: None  # between retries
third_pruner, third = pruned(0.6)
third_pruner.tokenizer.add_tokens("new")  # so that there are two large files to upload
break_uploads(1)
outcome["broke off"] = error(third_pruner.push_to_hub, third, "me/llama-70")
break_uploads(-1)
outcome["untouched"] = same(other, "me/llama-70")
third_pruner.push_to_hub(third, "me/llama-70", commit_message="Repeated")
outcome["repeated"] = same(third, "me/llama-70")

pruner.push_to_hub(model, "me/edited")
edited = b"---\ntags: [mine]\n---\n\n# Edited\n"
HfApi().upload_file(path_or_fileobj=edited, path_in_repo="README.md", repo_id="me/edited")
pruner.push_to_hub(model, "me/edited")

pushes = {"of the account": "fresh", "exists": "me/edited", "of an organisation": "lab/fresh"}
outcome["may push"] = [error(check_push, name) for name in pushes.values()]
refused = [
    ("not/an/id", None),
    ("else/fresh", None),
    ("library/fresh", None),
    ("me/x", "hf_read"),
    ("me/x", "hf_unknown"),
]
outcome["may not push"] = [error(check_push, name, token) for name, token in refused]

pruner.push_to_hub(model, "me/secret", private=True)
del os.environ["HF_TOKEN"]
outcome["check without token"] = error(check_push, "me/llama-70")
outcome["push without token"] = error(pruner.push_to_hub, model, "me/llama-70")
outcome["load without token"] = error(AutoModelForCausalLM.from_pretrained, "me/secret")
outcome["inspect without token"] = error(inspect_checkpoint, "me/secret")
outcome["convert without output"] = error(convert_checkpoint, "me/llama-70", "packed")
Path(sys.argv[1]).write_text(json.dumps(outcome))
