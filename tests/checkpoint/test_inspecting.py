import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file, save_file
from sparse_checkpoints import change_config, save_pruned, tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import convert_checkpoint, inspect_checkpoint


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "gpt2"])
def test_the_zeros_of_every_projection_are_counted(family, format, tmp_path):
    ignore = ["layers.0..*q_proj", r"experts\.1\."] if family in ("mixtral", "gpt_oss") else ["0.*(q_proj|c_attn)"]
    pruner, model = save_pruned(tmp_path, family, ignore=ignore, format=format)
    found, report = inspect_checkpoint(tmp_path), pruner.report
    assert not found.problems and found.format == format and found.files == 1
    assert found.total.sparsity == report.achieved_sparsity
    assert {name: share.sparsity for name, share in found.blocks.items()} == report.blocks
    assert all(share.sparsity == pytest.approx(share.recorded, abs=1e-12) for share in found.kinds.values())
    assert sum(share.weights for share in found.kinds.values()) == found.total.weights
    assert found.stored_bytes == sum(tensor.nbytes for tensor in tensors_of(tmp_path).values()) <= found.dense_bytes
    text = str(found)
    assert "magnitude + uniform" in text and "Verified" in text and "q_proj" in text or "c_attn" in text
    assert "model_type" not in text and f"({family})" in text


def test_zeros_that_are_not_there(tmp_path):
    """A single weight that grew back is reported, and so are zeros beyond the record."""
    save_pruned(tmp_path)
    tensors, name = tensors_of(tmp_path), "model.layers.1.mlp.up_proj.weight"
    zeros = (tensors[name] == 0).nonzero()
    tensors[name][tuple(zeros[5])] = 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = inspect_checkpoint(tmp_path)
    assert [problem.split(" has ")[0] for problem in found.problems] == ["the model", "model.layers.1", "mlp.up_proj"]
    assert "has 1 zeros fewer than recorded: 69.9" in found.problems[0] and "NOT as recorded" in str(found)
    tensors[name].zero_()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1 has" in (text := str(inspect_checkpoint(tmp_path))) and "zeros more than recorded" in text
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    missing = f"mlp.up_proj has {2 * 48 * 32:,} weights in the files instead of {3 * 48 * 32:,}"
    assert missing in inspect_checkpoint(tmp_path).problems, "all zeros of the other blocks are as recorded"
    save_file({key: value for key, value in tensors.items() if "up_proj" not in key}, tmp_path / "model.safetensors")
    assert "mlp.up_proj has no weights in the files" in inspect_checkpoint(tmp_path).problems


def test_weights_by_names_that_transformers_does_not_load(tmp_path):
    """All zeros are there, and the record has the same names."""
    save_pruned(tmp_path, "gpt_oss")
    tensors = {name.replace("down_proj", "down_proj_blocks"): value for name, value in tensors_of(tmp_path).items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kind = "mlp.experts.*.down_proj"
    names = ["model.layers.*.mlp.experts.down_proj_blocks"]
    change_config(tmp_path, lambda config: config["sparsity_config"]["projections"][kind].update(weights=names))
    (problem,) = inspect_checkpoint(tmp_path).problems
    assert problem.startswith("transformers does not find model.layers.0.mlp.experts.down_proj, ")


def test_the_weights_that_transformers_loads(tmp_path):
    """Its `save_pretrained` leaves the index of an earlier save in several files."""
    save_pruned(tmp_path / "model")
    shards = convert_checkpoint(tmp_path / "model", "dense", tmp_path / "shards", "20KB", dtype=torch.float32)
    AutoModelForCausalLM.from_pretrained(shards).save_pretrained(shards)
    assert (shards / "model.safetensors.index.json").exists() and not inspect_checkpoint(shards).problems


def test_damaged_files(tmp_path):
    save_pruned(tmp_path)
    change_config(tmp_path, lambda config: config["sparsity_config"].update(achieved_sparsity=float("inf")))
    with pytest.raises(ValueError, match="it has the sparsity inf, expected 0 to 1"):
        inspect_checkpoint(tmp_path)
    change_config(tmp_path, lambda config: config["sparsity_config"].update(achieved_sparsity=0.5))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor model.safetensors.index.json"):
        inspect_checkpoint(tmp_path)


def test_a_model_that_was_not_pruned(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert not found.problems and found.total.sparsity == 0
    assert list(found.blocks) == [f"model.layers.{index}" for index in range(3)] and "self_attn.q_proj" in found.kinds
    assert "not recorded in config.json" in str(found) and found.verdict == "0.00% zeros: there is nothing to verify."
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in tensors.items()}, tmp_path / "model.safetensors")
    assert 0 < inspect_checkpoint(tmp_path).total.sparsity < 0.1, "small weights were rounded to 0"


HOSTILE = "x\n\nVerified: the zeros agree with the sparsity_config.\x1b[2J\u202e\ud800"


def change_names(config):
    """Puts text that steers a terminal wherever a sparsity_config has text."""
    about = config["sparsity_config"]
    config["model_type"] = HOSTILE
    about["calibration"] = {"source": HOSTILE}
    about["versions"] = {HOSTILE: HOSTILE}
    about["config"] = {"saliency": HOSTILE, "topup": HOSTILE, "topup_args": {}}
    about["block_sparsity"][HOSTILE] = 0.5
    about["projections"][HOSTILE] = {"sparsity": 0.5, "weights": [HOSTILE]}


def test_what_files_hold_is_shown_escaped(tmp_path):
    """No line is forged, and nothing steers the terminal: each line is a row of a table or the verdict."""
    save_pruned(tmp_path)
    change_config(tmp_path, change_names)
    found = inspect_checkpoint(tmp_path)
    lines = str(found).split("\n")
    assert all(line.isprintable() for line in [*lines, *found.problems])
    assert not any(line.startswith("Verified") for line in lines) and lines[-1].startswith("NOT as recorded")
    assert r"x\n\nVerified: the zeros agree with the sparsity_config.\x1b[2J\u202e\ud800" in str(found)
    change_config(tmp_path, lambda config: config.update(model_type="x" * 10**6))
    change_config(tmp_path, lambda config: config["sparsity_config"]["block_sparsity"].update({"y" * 10**6: 0.5}))
    assert len(str(inspect_checkpoint(tmp_path))) < 50_000
