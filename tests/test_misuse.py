"""Every public function with values of every wrong type: the error is ours, names what came, and nothing is done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import make_model, make_tokenizer

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
         sparsity={"float"}, saliency={"none"}, saliency_args={"none"}, topup={"none"}, topup_args={"none"}, effort=set(),
         dataset={"none", "text"}, num_samples={"int"}, num_alignment_samples={"none", "int"}, seq_length={"none", "int"},
         min_expert_tokens={"int"}, seed={"int"},
         targets={"none"}, ignore={"none"}, pattern={"none"}, reconstruct={"none"}, refit_epochs={"none", "int"},
         refit_learning_rate={"int", "float"}, value_bits={"none", "int"}),
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
         directory_or_id=set(), format=set(), output=set(), max_shard_size=set(), value_bits=set()),
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
