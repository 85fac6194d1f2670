"""Every public function with values of every wrong type, and calls that are refused for what they are called on.

The error is ours and names what came, and nothing is done.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from conftest import make_model, make_tokenizer
from packed_models import assert_same_state
from sparse import make_sparse

import optimum_neuronal
from optimum_neuronal import NeuronALConfig, NeuronALPruner


OURS = (ValueError, TypeError, OSError, RuntimeError)

# Of every kind a value: what is asked for by a parameter, that it takes; everything else is wrong.
VALUES = {
    "none": None,
    "bool": True,
    "int": 3,
    "negative": -3,
    "float": 0.5,
    "nan": float("nan"),
    "text": "no such thing",
    "empty": "",
    "bytes": b"bytes",
    "path": Path("no-such-path"),
    "list": [1],
    "dict": {1: 2},
    "object": object(),
    "tensor": torch.ones(2, 2),
    "module": torch.nn.Linear(2, 2),
    "class": dict,
}
NUMBERS = {"int", "negative", "float", "nan"}
EVERYTHING = set(VALUES)


def ids():
    return torch.randint(0, 64, (12, 16), generator=torch.Generator().manual_seed(0))


def make_config(**fields):
    return NeuronALConfig(**{"sparsity": 0.5, "saliency": "wanda", "topup": "uniform", "dataset": None, **fields})


def make_pruner(**fields):
    return NeuronALPruner(make_config(num_samples=12, num_alignment_samples=2, **fields))


def pruned():
    pruner = make_pruner()
    pruner.prune(make_model("llama"), ids())
    return pruner


class Case:
    """A call that works, and for each of its parameters the kinds of values that it takes."""

    def __init__(self, what: str, call: Callable, arguments: Callable, /, **takes: set[str]):
        self.name, self.call, self.arguments, self.takes = what, call, arguments, takes


CASES = [
    Case("NeuronALConfig", NeuronALConfig, lambda: {"sparsity": 0.5},
         sparsity={"float"}, saliency={"none"}, saliency_args={"none"}, topup={"none"}, topup_args={"none"},
         dataset={"none", "text"}, num_samples={"int"}, num_alignment_samples={"none", "int"}, seq_length={"none", "int"},
         min_expert_tokens={"int"}, seed={"int"},
         targets={"none"}, ignore={"none"}, pattern={"none"}, reconstruct={"none"}, refit_epochs={"none", "int"},
         refit_learning_rate={"int", "float"}, embedding_bits={"none"}),
    Case("NeuronALConfig, quantising", NeuronALConfig, lambda: {"bits_per_weight": 2.4},
         bits_per_weight={"float", "int"}, topup={"none"}, embedding_bits={"none"}),
    Case("NeuronALConfig.from_dict", NeuronALConfig.from_dict, lambda: {}, config_dict=set()),
    Case("NeuronALConfig.from_json_file", NeuronALConfig.from_json_file, lambda: {}, path=set()),
    Case("NeuronALPruner", NeuronALPruner, lambda: {"config": make_config()}, config=set(), tokenizer={"none"}),
    Case("NeuronALPruner.from_dict", NeuronALPruner.from_dict, lambda: {}, config_dict=set()),
    Case("NeuronALPruner.from_pretrained", NeuronALPruner.from_pretrained,
         lambda: {"config": make_config(), "model_or_path": "nowhere"},
         model_or_path=set(), config=set(), file_name=set(), tokenizer=set(), stream_to=set(), device=set()),
    Case("NeuronALPruner.prune", lambda **given: make_pruner().prune(**given),
         lambda: {"model": make_model("llama"), "dataset": ids()}, model=set(), dataset=set(), work_dir={"none", "text", "path"}),
    Case("NeuronALPruner.draw_calibration", lambda **given: make_pruner().draw_calibration(**given),
         lambda: {"model": make_model("llama"), "dataset": ids()}, model=set(), dataset=set()),
    Case("NeuronALPruner.save", lambda **given: pruned().save(**given), lambda: {"directory": "never-written"},
         model=set()),
    Case("NeuronALPruner.push_to_hub", lambda **given: pruned().push_to_hub(**given),
         lambda: {"repo_id": "me/model"}, model=set()),
    Case("NeuronALPruner.quantize", lambda **given: make_pruner().quantize(**given), lambda: {"save_dir": "never"},
         save_dir=set(), file_prefix=set()),
    Case("evaluate_perplexity", optimum_neuronal.evaluate_perplexity,
         lambda: {"model": make_model("llama"), "tokenizer": None, "dataset": ids(), "seq_length": 16},
         model=set(), dataset=set(), seq_length={"none", "int"}, max_windows={"none", "int"}, batch_size={"int"}),
    Case("evaluate_tasks", optimum_neuronal.evaluate_tasks,
         lambda: {"model": make_model("llama"), "tokenizer": make_tokenizer(), "tasks": ["boolq"]},
         model=set(), tokenizer=set(), tasks=set(), limit=set(), batch_size=set(), include_path=set()),
    Case("compare", optimum_neuronal.compare,
         lambda: {"model": make_model("llama"), "dataset": ids(), "evaluate": {"own": ids()}, "topups": ["uniform"],
                  "sparsities": [0.5], "num_samples": 12, "num_alignment_samples": 2},
         model=set(), saliencies=set(), topups=set(), sparsities=set(), dataset=set(), evaluate=set(), tasks=set(),
         max_windows={"none", "int"}),
    Case("save_pretrained", optimum_neuronal.save_pretrained,
         lambda: {"model": make_model("llama"), "save_directory": "never-written", "format": "dense"},
         model=set(), save_directory={"text", "path"}, format=set()),
    Case("inspect_checkpoint", optimum_neuronal.inspect_checkpoint, lambda: {}, directory_or_id=set()),
    Case("convert_checkpoint", optimum_neuronal.convert_checkpoint,
         lambda: {"directory_or_id": "./no-such-directory", "format": "packed"},
         directory_or_id=set(), format=set(), output=set(), max_shard_size=set(), embedding_bits=set()),
    Case("sparsify", optimum_neuronal.sparsify, lambda: {}, model=set()),
    Case("densify", optimum_neuronal.densify, lambda: {}, model={"module"}),
    Case("SparseModelForCausalLM.from_pretrained", optimum_neuronal.SparseModelForCausalLM.from_pretrained,
         lambda: {}, directory_or_id=set()),
    Case("keep_sparsity", optimum_neuronal.keep_sparsity, lambda: {}, model=set()),
    Case("keep_lora_sparse", optimum_neuronal.keep_lora_sparse, lambda: {}, model=set()),
    Case("NeuronALCallback", optimum_neuronal.NeuronALCallback, lambda: {"config": make_config(), "at_step": 3},
         config=set(), at_step={"int"}),
    Case("NeuronALCallback, by schedule", optimum_neuronal.NeuronALCallback, lambda: {"config": make_config()},
         schedule={"dict"} - {"dict"}),
    Case("Architecture", optimum_neuronal.Architecture, lambda: {}, roles=set(), parallel={"bool"},
         stacked_experts={"bool"}, blocks={"none", "text"}),
    Case("register_architecture", optimum_neuronal.register_architecture,
         lambda: {"model_type": "own", "architecture": optimum_neuronal.Architecture()},
         model_type={"text"}, architecture=set()),
    Case("register_saliency", lambda name: optimum_neuronal.register_saliency(name)(dict), lambda: {}, name=set()),
    Case("register_topup", lambda name: optimum_neuronal.register_topup(name)(dict), lambda: {}, name=set()),
]  # fmt: skip
PARAMETERS = [
    pytest.param(case, parameter, id=f"{case.name}-{parameter}") for case in CASES for parameter in case.takes
]


@pytest.mark.parametrize("case, parameter", PARAMETERS)
def test_a_value_of_the_wrong_type(case, parameter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in sorted(EVERYTHING - case.takes[parameter]):
        with pytest.raises(OURS) as error:
            case.call(**{**case.arguments(), parameter: VALUES[kind]})
        message = str(error.value)
        assert message.rstrip().endswith((".", "?")) and len(message.split()) > 4, f"{kind}: a raw error: {message!r}"
        assert not list(tmp_path.iterdir()), f"{kind}: something is written"


def packed_model():
    return optimum_neuronal.sparsify(make_sparse())


def adapted(model, merged: bool = False):
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    if merged:
        model.merge_adapter()
    return model


def dense_weight_of(model) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.mlp.up_proj.weight": torch.ones(model.get_submodule("model.layers.0.mlp.up_proj").dense_shape)
    }


def damaged_part_of(model) -> dict[str, torch.Tensor]:
    """Return one packed weight whose values are too few."""
    name = "model.layers.0.mlp.up_proj."
    parts = {key: value.clone() for key, value in model.state_dict().items() if key.startswith(name)}
    return {**parts, f"{name}values": parts[f"{name}values"][:-1]}


def dense(**overrides):
    return make_model("llama", **overrides)


def with_nan():
    model = dense()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    return model


# What is called -> the model that it is called on, and the call, with a folder that holds a file of the user's.
REFUSED = {
    "prune: token ids beyond the vocabulary": (dense, lambda m, d: make_pruner().prune(m, ids() + 10**6)),
    "prune: too few sequences": (dense, lambda m, d: make_pruner().prune(m, ids()[:2])),
    "prune: no calibration": (dense, lambda m, d: make_pruner().prune(m)),
    "prune: targets that match nothing": (dense, lambda m, d: make_pruner(targets=["gone"]).prune(m, ids())),
    "prune: work_dir is a file": (dense, lambda m, d: make_pruner().prune(m, ids(), work_dir=d / "own.txt")),
    "prune: a weight that is not finite": (with_nan, lambda m, d: make_pruner().prune(m, ids())),
    "prune: sparse already": (make_sparse, lambda m, d: make_pruner().prune(m, ids())),
    "prune: packed": (packed_model, lambda m, d: make_pruner().prune(m, ids())),
    "prune: with adapters": (lambda: adapted(dense()), lambda m, d: make_pruner().prune(m, ids())),
    "save_pretrained: into a file": (dense, lambda m, d: optimum_neuronal.save_pretrained(m, d / "own.txt")),
    "save_pretrained: below a file": (dense, lambda m, d: optimum_neuronal.save_pretrained(m, d / "own.txt" / "new")),
    "save_pretrained: packed, a variant": (
        make_sparse, lambda m, d: optimum_neuronal.save_pretrained(m, d, "packed", variant="fp16")),
    "save_pretrained: no such size": (make_sparse, lambda m, d: optimum_neuronal.save_pretrained(m, d, max_shard_size="x")),
    "its own save_pretrained: packed, a state dict": (
        packed_model, lambda m, d: m.save_pretrained(d, state_dict=dense().state_dict())),
    "save: a model that another pruner has pruned": (make_sparse, lambda m, d: pruned().save(m, d / "new")),
    "convert: no model there": (dense, lambda m, d: optimum_neuronal.convert_checkpoint(d, "packed", d / "new")),
    "sparsify: dense": (dense, lambda m, d: optimum_neuronal.sparsify(m)),
    "sparsify: twice, head": (packed_model, lambda m, d: optimum_neuronal.sparsify(m, embedding_bits=8)),
    "sparsify: with adapters": (lambda: adapted(make_sparse()), lambda m, d: optimum_neuronal.sparsify(m)),
    "load_state_dict: dense into packed": (packed_model, lambda m, d: m.load_state_dict(dense_weight_of(m), strict=False)),
    "load_state_dict: damaged into packed": (
        packed_model, lambda m, d: m.load_state_dict(damaged_part_of(m), strict=False)),
    "forward: packed, in training": (
        packed_model, lambda m, d: m(inputs_embeds=torch.ones(1, 4, m.config.hidden_size, requires_grad=True))),
    "keep_sparsity: dense": (dense, lambda m, d: optimum_neuronal.keep_sparsity(m)),
    "keep_sparsity: packed": (packed_model, lambda m, d: optimum_neuronal.keep_sparsity(m)),
    "keep_lora_sparse: no adapters": (make_sparse, lambda m, d: optimum_neuronal.keep_lora_sparse(m)),
    "keep_lora_sparse: dense": (lambda: adapted(dense()), lambda m, d: optimum_neuronal.keep_lora_sparse(m)),
    "keep_lora_sparse: merged": (
        lambda: adapted(make_sparse(), merged=True), lambda m, d: optimum_neuronal.keep_lora_sparse(m)),
    "evaluate_perplexity: too little text": (
        dense, lambda m, d: optimum_neuronal.evaluate_perplexity(m, None, ids()[:1, :4], seq_length=16)),
    "compare: no such top-up": (dense, lambda m, d: optimum_neuronal.compare(m, dataset=ids(), topups=["gone"])),
    "compare: sparse already": (
        make_sparse, lambda m, d: optimum_neuronal.compare(
            m, dataset=ids(), evaluate={"own": ids()}, topups=["uniform"], sparsities=[0.5], num_samples=12)),
}  # fmt: skip


def about(model) -> dict:
    """Everything of a model but its weights that a call might leave behind."""
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False)}
    hooks = [name for name in vars(torch.nn.Module()) if "hook" in name]
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "hooks": {name: [list(getattr(module, hook) or ()) for hook in hooks] for name, module in modules.items()},
        "own": {name: sorted(vars(module)) for name, module in modules.items()},
        "trained": {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
    }


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_changes_nothing(what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, call = REFUSED[what]
    model = make().train()
    model.get_submodule("base_model.model.model.norm" if hasattr(model, "peft_config") else "model.norm").eval()
    model.config.use_cache = True
    (tmp_path / "own.txt").write_text("precious")
    before, state = copy.deepcopy(about(model)), copy.deepcopy(model.state_dict())
    with pytest.raises(OURS):
        call(model, tmp_path)
    assert about(model) == before
    assert_same_state(model, state)
    assert [path.name for path in tmp_path.iterdir()] == ["own.txt"]
    assert (tmp_path / "own.txt").read_text() == "precious"
