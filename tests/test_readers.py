"""Readers that disagree: whoever reads a checkpoint finds the same numbers in each dtype, or each refuses it in words."""

import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples
from sparse_checkpoints import save_pruned, tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import SparseModelForCausalLM, convert_checkpoint, densify, inspect_checkpoint
from optimum_neuronal.checkpoint.weight_writers import PackedWriter


FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = {"values": {}, "codes": {"value_bits": 3}, "head": {"value_bits": 4, "embedding_bits": 8}}


@cache
def stored(family, dtype, form) -> tuple[Path, Path]:
    """A packed checkpoint, and the dense one of the same weights."""
    folder = Path(mkdtemp())
    save_pruned(folder / "packed", family, dtype=dtype, format="packed", **FORMATS[form])
    return folder / "packed", convert_checkpoint(folder / "packed", "dense", folder / "dense")


def readings(packed, dense, dtype):
    """Each way to a dense model of a dtype."""
    yield "packed", AutoModelForCausalLM.from_pretrained(packed, dtype=dtype)
    yield "device_map", AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, device_map="cpu")
    yield "converted in memory", AutoModelForCausalLM.from_pretrained(packed, dtype="auto").to(dtype)
    for name, folder in {"kept packed": packed, "packed as it is read": dense}.items():
        model = SparseModelForCausalLM.from_pretrained(folder, dtype=dtype)
        yield f"{name}, copied", densify(copy.deepcopy(model))
        yield name, densify(model)
    kept = SparseModelForCausalLM.from_pretrained(packed, dtype="auto")
    yield "kept packed, converted in memory", densify(kept.to(dtype))


@examples(1)
@given(
    family=st.sampled_from(["llama", "gpt2"]),
    source=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
    form=st.sampled_from(list(FORMATS)),
)
@example(family="llama", source=torch.bfloat16, dtype=torch.float32, form="codes")
@example(family="gpt2", source=torch.bfloat16, dtype=torch.float16, form="head")
def test_all_readers_find_the_same_numbers(family, source, dtype, form):
    packed, dense = stored(family, source, form)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype).state_dict()
    for reader, model in readings(packed, dense, dtype):
        found = model.state_dict()
        assert found.keys() == expected.keys(), reader
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), (reader, name)


def test_embeddings_look_up_what_densify_gives():
    packed, _ = stored("llama", torch.bfloat16, "head")
    model, ids = SparseModelForCausalLM.from_pretrained(packed, dtype=torch.float32), torch.arange(8)
    assert torch.equal(model.get_input_embeddings()(ids), densify(model).get_input_embeddings()(ids))


@pytest.mark.parametrize("form", ["codes", "head"])
def test_a_model_saved_in_another_dtype_keeps_its_numbers(form, tmp_path):
    packed, dense = stored("llama", torch.bfloat16, form)
    model = SparseModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_integers_in_the_place_of_floats_are_refused_by_all(name, dtype, tmp_path):
    _, dense = stored("llama", torch.float32, "values")
    packed = convert_checkpoint(dense, "packed", tmp_path / "packed")
    for path in packed.glob("packed-*"):
        path.unlink()
    tensors = tensors_of(dense)
    with PackedWriter(packed, "1GB") as writer:
        for key, tensor in (tensors | {name: tensors[name].to(dtype)}).items():
            writer.add(key, tensor)
    uses = [
        AutoModelForCausalLM.from_pretrained,
        SparseModelForCausalLM.from_pretrained,
        inspect_checkpoint,
        lambda folder: convert_checkpoint(folder, "dense", tmp_path / "dense"),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"{name} has the dtype .*: the checkpoint is damaged"):
            use(packed)
