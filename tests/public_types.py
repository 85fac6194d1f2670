"""What a user's type checker sees of the public interface: `make check` reads this file, nothing runs it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import assert_type

import optimum_neuronal as neuronal
from optimum_neuronal.saliency import Saliency
from optimum_neuronal.topup import Allocation, TopUp


def prune(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    config = neuronal.NeuronALConfig(0.7, saliency="wanda", topup="owl", topup_args={"half_width": 0.1}, dataset=None)
    assert_type(config.sparsity, float)
    assert_type(neuronal.NeuronALConfig.preset("fast"), neuronal.NeuronALConfig)
    pruner = neuronal.NeuronALPruner(config, tokenizer)
    model = pruner.prune(model, dataset=["text"], work_dir=folder / "work")
    assert_type(pruner.report, neuronal.PruningReport | None)
    pruner.save(model, folder)
    assert_type(pruner.push_to_hub(model, "me/sparse", private=True), str)
    assert_type(neuronal.NeuronALPruner.from_pretrained("dense", config=config, dtype="auto"), neuronal.NeuronALPruner)
    assert_type(neuronal.__version__, str)


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    assert_type(neuronal.evaluate_perplexity(model, tokenizer, "wikitext2", max_windows=2), float)
    assert_type(neuronal.evaluate_perplexity("dense", dataset=torch.zeros(1, 8, dtype=torch.int64)), float)
    assert_type(neuronal.evaluate_tasks(model, tokenizer, ["boolq"])["boolq"].score, float)
    comparison = neuronal.compare(
        "dense", saliencies=["wanda"], sparsities=[0.5], evaluate={"mine": folder}, num_samples=8
    )
    neuronal.compare("dense", sparsities=[0.5], presets=["fast"])
    comparison.save(folder)


def store(model: PreTrainedModel, folder: Path) -> None:
    neuronal.save_pretrained(model, folder, format="packed")
    neuronal.convert_checkpoint(folder, "dense", folder / "dense")
    neuronal.inspect_checkpoint(folder)
    neuronal.densify(neuronal.sparsify(model))


def train(model: PreTrainedModel) -> None:
    with neuronal.keep_sparsity(model) as keeper:
        keeper.apply()
    assert_type(keeper.sparsity, float)
    neuronal.keep_lora_sparse(model, exact=False)
    neuronal.lora_for_packed(model, "adapter")
    neuronal.SparsityCallback()
    neuronal.NeuronALCallback(neuronal.NeuronALConfig(0.7), schedule={0: 0.5, 100: 0.7})
    neuronal.register_architecture("mine", neuronal.Architecture(roles={"attn.wq": "query", "gate": None}))


@neuronal.register_saliency("mine")
@dataclass(frozen=True)
class Mine(Saliency):
    power: float = 0.5

    def score(self, weight: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
        return weight.abs() * activation**self.power


@neuronal.register_topup("mine")
@dataclass(frozen=True)
class MyTopUp(TopUp):
    half_width: float = 0.05

    def allocate(self, evaluator: Any, sparsity: float) -> Allocation:
        raise NotImplementedError


assert_type(Mine(power=1.0).power, float)  # a registered class is still the class that it was
assert_type(MyTopUp(half_width=0.1).half_width, float)
Mine(power="much")  # type: ignore[arg-type]  # an error that is not found is one
