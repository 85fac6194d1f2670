"""Files of packed checkpoints as docs/format.md describes them, and what damage does."""

import json

import pytest
import torch
from packed_models import make_zeroed
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sparse_checkpoints import same
from transformers import AutoModelForCausalLM

from optimum_neuronal import inspect_checkpoint, save_pretrained, sparsify
from optimum_neuronal.checkpoint.packed_files import read_headers, read_weights


FILE, INDEX = "packed-00001-of-00001.safetensors", "packed.safetensors.index.json"
WEIGHT = "model.layers.0.mlp.up_proj"
MASK = f"{WEIGHT}.packed_mask"


@pytest.fixture
def folder(tmp_path):
    save_pretrained(make_zeroed("llama", num_hidden_layers=1), tmp_path, format="packed")
    return tmp_path


def metadata(folder):
    with safe_open(folder / FILE, framework="pt") as file:
        return json.loads(file.metadata()["neuronal"])


def rewrite(folder, change):
    """Write the file again after a change of its tensors and metadata."""
    tensors, about = load_file(folder / FILE), metadata(folder)
    change(tensors, about)
    save_file(tensors, folder / FILE, metadata={"format": "pt", "neuronal": json.dumps(about)})


def test_a_sparse_weight_by_hand(folder):
    """A bit for each element, rows rounded up to 64; and the values that are not zero, row by row."""
    model = make_zeroed("llama", num_hidden_layers=1)
    weight, tensors = model.get_submodule(WEIGHT).weight.data, load_file(folder / FILE)
    mask, values = tensors[MASK], tensors[f"{WEIGHT}.packed_values"]
    rows, columns = weight.shape
    assert mask.dtype == torch.uint8 and mask.shape == (rows, 8)
    bits = torch.tensor([[mask[i, j // 8] >> (j % 8) & 1 for j in range(64)] for i in range(rows)]).bool()
    assert torch.equal(bits[:, :columns], weight != 0) and not bits[:, columns:].any()
    assert torch.equal(values, weight[weight != 0])
    about = {"format": "sparse", "shape": [rows, columns], "dtype": "float32"}
    assert metadata(folder)["weights"][WEIGHT] == about
    assert same(tensors, sparsify(model).state_dict()), "the file holds the state of the packed model"
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "optimum_neuronal", "format": "packed", "version": 1}


def test_a_weight_may_lie_in_two_files(tmp_path):
    model = make_zeroed("llama", num_hidden_layers=1)
    save_pretrained(model, tmp_path, format="packed", max_shard_size=2500)
    files = sorted(tmp_path.glob("packed-*"))
    named = json.loads((tmp_path / INDEX).read_text())["weight_map"].values()
    assert len(files) > 5 and set(named) == {path.name for path in files}
    assert len(read_headers(files)[WEIGHT].tensors) == 2
    found = {name: weight for name, weight, _ in read_weights(tmp_path, packed=True)}
    assert torch.equal(found[f"{WEIGHT}.weight"].to_dense(), model.get_submodule(WEIGHT).weight)


def offset(tensors, about):
    tensors[f"{WEIGHT}.packed_values"] = tensors[f"{WEIGHT}.packed_values"][:-1].clone()


def about_weight(**facts):
    return lambda tensors, about: about["weights"][WEIGHT].update(facts)


@pytest.mark.parametrize(
    "change",
    [
        offset,
        lambda tensors, about: tensors[MASK][0, -1].fill_(128),  # a bit behind the last column
        lambda tensors, about: tensors[MASK][0, 0].fill_(255),
        lambda tensors, about: tensors.update({MASK: tensors[MASK].int()}),
        lambda tensors, about: tensors.pop(MASK),
        about_weight(shape=[2**40, 2**40]), about_weight(shape=[-1, 32]), about_weight(shape="x"),
        about_weight(format="os.system"), about_weight(dtype="object"), about_weight(transposed=True),
        lambda tensors, about: about.update(version=2),
        lambda tensors, about: about.update(weights=3),
        lambda tensors, about: about["weights"].update({"model.\x1b[2J": about["weights"][WEIGHT]}),
        lambda tensors, about: about["weights"].update({"model.nothing": about["weights"][WEIGHT]}),
        lambda tensors, about: about["weights"].pop(WEIGHT),
        lambda tensors, about: about["weights"].update({f"{WEIGHT}s": about["weights"].pop(WEIGHT)}),
    ],
)  # fmt: skip
def test_damage_is_an_error_before_anything_is_computed(folder, change):
    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(folder)
    assert str(error.value).isprintable()


def test_a_damaged_weight_is_named(folder):
    rewrite(folder, offset)
    with pytest.raises(ValueError, match=f"packed weight of {WEIGHT} is damaged: its bitmask keeps"):
        list(read_weights(folder, packed=True))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(content, folder):
    (folder / INDEX).write_text(content)
    with pytest.raises(ValueError, match=INDEX):
        list(read_weights(folder, packed=True))


def test_another_version_raises(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    for read in (AutoModelForCausalLM.from_pretrained, inspect_checkpoint):
        with pytest.raises(ValueError, match="version 2: expected 'packed', version 1"):
            read(folder)
