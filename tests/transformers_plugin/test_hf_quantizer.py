import copy
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from optimum_neuronal import NeuronALConfig, save_pretrained

from .conftest import config


def test_the_config_is_a_quantization_config_to_transformers(dense):
    cfg = config(dense)
    assert NeuronALConfig.from_dict(copy.deepcopy(cfg).to_dict()) == cfg
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg.to_dict())
    expected = AutoModelForCausalLM.from_pretrained(dense, quantization_config=cfg)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected.model.layers[0].mlp.up_proj.weight)
    with pytest.raises(ValueError, match="no field 'saliencys'"):
        AutoModelForCausalLM.from_pretrained(dense, quantization_config={**cfg.to_dict(), "saliencys": "wanda"})


FROM_THE_HUB = """
import sys
import optimum_neuronal
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
import torch
packed = AutoModelForCausalLM.from_pretrained("me/packed")
assert packed.config.sparsity_config["format"] == "dense" and not hasattr(packed.config, "quantization_config")
from optimum_neuronal import NeuronALConfig
cfg = NeuronALConfig(0.7, topup="uniform", dataset=sys.argv[1], num_samples=4, num_alignment_samples=2, seq_length=16, saliency="wanda")
pruned = AutoModelForCausalLM.from_pretrained("me/dense", quantization_config=cfg, revision="main")
for name, value in pruned.state_dict().items():
    assert torch.equal(packed.state_dict()[name], value), name
packed.push_to_hub("me/again")
"""


def test_from_the_hub(dense, tmp_path):
    """The package is imported first, and alone; then a packed checkpoint is loaded, and a dense one pruned."""
    from hub_standin import Repository, serve

    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(dense))
    save_pretrained(model, tmp_path / "packed", format="packed")
    with serve() as hub:
        for name in ("dense", "packed"):
            files = {file.name: (file.read_bytes(), None) for file in (tmp_path / name).iterdir()}
            hub.repositories[f"me/{name}"] = Repository(files=files)
        environment = hub.environment(tmp_path / "home")
        command = [sys.executable, "-c", FROM_THE_HUB, tmp_path / "text.txt"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
        packed = (tmp_path / "packed" / "packed-00001-of-00001.safetensors").read_bytes()
        pushed = hub.repositories["me/again"].files
        assert pushed["packed-00001-of-00001.safetensors"][0] == packed and "model.safetensors" not in pushed
