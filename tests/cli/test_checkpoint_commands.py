import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparse_checkpoints import change_config, same, save_pruned, tensors_of

from optimum_neuronal import densify
from optimum_neuronal.model.load_model import load_model


@pytest.fixture
def sparse(tmp_path):
    save_pruned(tmp_path / "sparse")
    return tmp_path / "sparse"


def test_inspect_counts_the_zeros(run, sparse, capsys):
    text = run("inspect", sparse)
    assert "magnitude + uniform" in text and "model.layers.2" in text and "mlp.down_proj" in text
    weights = load_file(sparse / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(1)
    save_file(weights, sparse / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stop:
        run("inspect", sparse)
    assert stop.value.code == 1 and "NOT as recorded: the model has 1,0" in capsys.readouterr().out


def test_convert_there_and_back(run, sparse, tmp_path):
    before = load_file(sparse / "model.safetensors")
    for _ in range(2):
        shown = run("convert", sparse, "--format", "packed", "--output", tmp_path / "p", "--overwrite")
        assert re.search(r"packed: 1\d\d\.\d\d kB became \d\d\.\d\d kB\.", shown)
    with pytest.raises(SystemExit, match="p holds 6 files of a model: .*--overwrite"):
        run("convert", "gone", "--format", "packed", "--output", tmp_path / "p")
    with pytest.raises(SystemExit, match="sparse, which is read: choose a new directory"):
        run("convert", sparse, "--format", "packed", "--output", sparse, "--overwrite")
    assert "Verified" in run("inspect", tmp_path / "p")
    run("convert", tmp_path / "p", "--format", "dense", "--output", tmp_path / "d")
    assert same(before, tensors_of(tmp_path / "d"))


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_convert_to_another_dtype(run, sparse, tmp_path, format):
    run("convert", sparse, "--format", format, "--dtype", "bfloat16", "--output", tmp_path / "half")
    before, after = load_model(sparse).bfloat16(), densify(load_model(tmp_path / "half"))
    assert after.dtype == torch.bfloat16 and same(before.state_dict(), after.state_dict())
    assert "Verified" in run("inspect", tmp_path / "half") and "bfloat16" in (tmp_path / "half/README.md").read_text()


def test_convert_runs_code_of_the_checkpoint_only_if_it_is_trusted(run, sparse, tmp_path):
    code = "from transformers import LlamaForCausalLM\n\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    (sparse / "modeling_mine.py").write_text(code)
    mine = {"architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}
    change_config(sparse, lambda config: config.update(mine))
    given = ("convert", sparse, "--format", "packed", "--output", tmp_path / "packed")
    with pytest.raises(SystemExit, match="trust_remote_code"):
        run(*given)
    run(*given, "--trust-remote-code")
    assert type(load_model(tmp_path / "packed", trust_remote_code=True)).__name__ == "Mine"
