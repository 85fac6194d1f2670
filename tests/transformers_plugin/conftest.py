"""A dense checkpoint to prune while it is loaded, and how; a transformers to register with."""

import copy

import peft
import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig


# What registration.py and hf_quantizer.py use of transformers, in a package whose parent does not import the list.
LAZY = {
    "__init__.py": "",
    "utils/__init__.py": "",
    "utils/quantization_config.py": "class QuantizationConfigMixin: pass",
    "quantizers/__init__.py": """
import importlib
def __getattr__(name):
    if name != "auto":
        raise AttributeError(name)
    return importlib.import_module(".auto", __name__)
""",
    "quantizers/base.py": "class HfQuantizer: pass",
    "quantizers/auto.py": """
import sys
QUANTIZERS, CONFIGS = {}, {}
executed = sys.__dict__.setdefault("executed", [])
executed.append(__name__)
if "fails" in sys.argv and len(executed) == 1:
    raise OSError("the disk was busy")
def register_quantizer(name):
    return lambda cls: QUANTIZERS.setdefault(name, cls)
def register_quantization_config(name):
    return lambda cls: CONFIGS.setdefault(name, cls)
""",
}


@pytest.fixture
def lazy(tmp_path):
    """A folder with a transformers whose parent package imports its list of quantizers when it is first used."""
    for name, content in LAZY.items():
        file = tmp_path / "transformers" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path


@pytest.fixture
def dense(tmp_path, tokenizer):
    """A dense checkpoint with its tokenizer, and text that it can be calibrated with."""
    make_model("llama").save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    words = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    return tmp_path / "dense"


def config(dense, **fields):
    values = dict(
        topup="uniform", dataset=str(dense.parent / "text.txt"), num_samples=4, num_alignment_samples=2, seq_length=16
    )
    return NeuronALConfig(0.7, **{"saliency": "wanda", **values, **fields})


def used_as_plain(model):
    """Use a model as any other: compute gradients, convert a copy. Return it with an adapter merged that adds nothing."""
    ids = torch.arange(16)[None]
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert copy.deepcopy(model).half().dtype == torch.float16
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).merge_and_unload()
