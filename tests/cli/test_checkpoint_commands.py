import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from sparse_checkpoints import save_pruned

from optimum_neuronal.checkpoint.own_files import MARK


@pytest.fixture
def sparse(tmp_path):
    save_pruned(tmp_path / "sparse")
    return tmp_path / "sparse"


def test_inspect_tells_and_verifies(run, sparse, capsys):
    text = run("inspect", sparse)
    assert "magnitude + uniform" in text and "model.layers.2" in text and "mlp.down_proj" in text
    assert text.strip().endswith("Verified: the zeros agree with the sparsity_config.")
    values = json.loads(run("inspect", sparse, "--json"))
    assert values["format"] == "dense" and values["problems"] == []
    weights = load_file(sparse / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"].fill_(1)
    save_file(weights, sparse / "model.safetensors", metadata={"format": "pt"})
    for flags in ((), ("--json",)):
        with pytest.raises(SystemExit) as stop:
            run("inspect", sparse, *flags)
        assert stop.value.code == 1
    assert "NOT as recorded: the model has 1,0" in capsys.readouterr().out


def test_inspect_needs_no_torch_model(run, sparse, monkeypatch):
    """A model type that nobody knows, and code that comes with it, are no obstacle and are not run."""
    config = json.loads((sparse / "config.json").read_text())
    config |= {"model_type": "of-tomorrow", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    (sparse / "config.json").write_text(json.dumps(config))
    (sparse / "modeling.py").write_text("raise SystemExit('was run')")
    assert "of-tomorrow" in run("inspect", sparse)
    run("convert", sparse, "--format", "packed")
    assert "of-tomorrow" in run("inspect", sparse) and (sparse / "modeling.py").exists()


def test_convert_there_and_back(run, sparse, tmp_path):
    before = load_file(sparse / "model.safetensors")
    assert "packed: 0.1 MB became 0.1 MB" in run(
        "convert", sparse, "--format", "packed", "--output", tmp_path / "packed"
    )
    assert "Verified" in run("inspect", tmp_path / "packed")
    run("convert", tmp_path / "packed", "--format", "dense", "--max-shard-size", "20KB")
    assert len(list((tmp_path / "packed").glob("model-*.safetensors"))) > 2
    after = {}
    for file in (tmp_path / "packed").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(SystemExit, match="convert: error: .* is dense already"):
        run("convert", sparse, "--format", "dense")
    with pytest.raises(SystemExit, match="inspect: error: The directory .* does not exist: check its path"):
        run("inspect", tmp_path / "absent")


def test_convert_rounds_embeddings_and_head(run, sparse, tmp_path):
    with pytest.raises(SystemExit, match="embedding_bits is 8, but the format 'dense'"):
        run("convert", sparse, "--format", "dense", "--embedding-bits", 8, "--output", tmp_path / "packed")
    with pytest.raises(SystemExit, match="convert: error: embedding_bits is 4: expected 8"):
        run("convert", sparse, "--format", "packed", "--embedding-bits", 4, "--output", tmp_path / "packed")
    run("convert", sparse, "--format", "packed", "--embedding-bits", 8, "--output", tmp_path / "head")
    assert "embeddings and head" in run("inspect", tmp_path / "head")
    assert not (tmp_path / "packed").exists()


def test_a_terminal_that_knows_ascii_alone(run, sparse, tmp_path, monkeypatch):
    """What was written is told, and the status is 0."""
    output, shown = tmp_path / "Modèle", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    run("convert", sparse, "--format", "packed", "--output", output)
    assert b"Mod\\xe8le, packed: " in shown.getvalue() and (output / "config.json").exists()


def test_convert_leaves_what_it_did_not_write(run, sparse, tmp_path):
    output = tmp_path / "packed"
    output.mkdir()
    (output / "README.md").write_text("# Mine")
    with pytest.raises(SystemExit, match="packed holds README.md, which this command did not write.*--overwrite"):
        run("convert", sparse, "--format", "packed", "--output", output)
    assert [file.name for file in output.iterdir()] == ["README.md"]
    for flags in (("--output", output, "--overwrite"), ("--output", tmp_path / "new"), ("--output", tmp_path / "new")):
        run("convert", sparse, "--format", "packed", *flags)
    assert (output / "README.md").read_text() == "# Mine"
    card = (tmp_path / "new" / "README.md").read_text()
    assert MARK in card and "import optimum_neuronal" in card
