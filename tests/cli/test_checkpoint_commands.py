import json

import pytest
from safetensors.torch import load_file, save_file
from sparse_checkpoints import save_pruned


@pytest.fixture
def sparse(tmp_path):
    save_pruned(tmp_path / "sparse")
    return tmp_path / "sparse"


def test_inspect_counts_the_zeros(run, sparse, capsys):
    text = run("inspect", sparse)
    assert "magnitude + uniform" in text and "model.layers.2" in text and "mlp.down_proj" in text
    values = json.loads(run("inspect", sparse, "--json"))
    assert values["format"] == "dense" and values["problems"] == []
    weights = load_file(sparse / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(1)
    save_file(weights, sparse / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stop:
        run("inspect", sparse)
    assert stop.value.code == 1 and "NOT as recorded: the model has 1,0" in capsys.readouterr().out


def test_convert_there_and_back(run, sparse, tmp_path):
    before = load_file(sparse / "model.safetensors")
    assert "packed: 0.1 MB became 0.1 MB" in run("convert", sparse, "--format", "packed", "--output", tmp_path / "p")
    assert "Verified" in run("inspect", tmp_path / "p")
    run("convert", tmp_path / "p", "--format", "dense", "--max-shard-size", "20KB")
    files = list((tmp_path / "p").glob("model-*.safetensors"))
    after = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2 and before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_convert_leaves_what_it_did_not_write(run, sparse, tmp_path):
    output = tmp_path / "packed"
    output.mkdir()
    (output / "README.md").write_text("# Mine")
    with pytest.raises(SystemExit, match="packed is not empty.*--overwrite"):
        run("convert", sparse, "--format", "packed", "--output", output)
    assert [file.name for file in output.iterdir()] == ["README.md"]
    run("convert", sparse, "--format", "packed", "--output", output, "--overwrite")
    assert (output / "README.md").read_text() == "# Mine"
