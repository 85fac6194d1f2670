"""Readers that disagree: whoever reads a checkpoint finds the same numbers in each dtype, or each refuses it in words."""

import copy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from conftest import make_model
from few_bits import make_few_bits
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples
from sparse_checkpoints import tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import (
    NeuronALConfig,
    NeuronALPruner,
    SparseModelForCausalLM,
    convert_checkpoint,
    densify,
    inspect_checkpoint,
    save_pretrained,
)
from optimum_neuronal.checkpoint.weight_writers import PackedWriter


FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["sparse", "head", "quantised"]


@cache
def stored(family, dtype, form) -> tuple[Path, Path]:
    """Return a packed checkpoint, and the dense one of the same weights."""
    folder = Path(mkdtemp())
    if form == "quantised":
        model = make_few_bits(family, sparse=True, dtype=dtype)
    else:
        config = NeuronALConfig(
            0.7, saliency="magnitude", topup="uniform", embedding_bits=8 if form == "head" else None
        )
        model = NeuronALPruner(config).prune(make_model(family).to(dtype))
    for format in ("packed", "dense"):
        save_pretrained(model, folder / format, format)
    return folder / "packed", folder / "dense"


def readings(packed, dense, dtype):
    """Yield each way to a dense model of a dtype: of the packed checkpoint, then of the dense one."""
    yield "packed", AutoModelForCausalLM.from_pretrained(packed, dtype=dtype)
    yield "device_map", AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, device_map="cpu")
    yield "converted in memory", AutoModelForCausalLM.from_pretrained(packed, dtype="auto").to(dtype)
    yield "kept packed", SparseModelForCausalLM.from_pretrained(packed, dtype=dtype)
    yield "kept packed, converted in memory", SparseModelForCausalLM.from_pretrained(packed, dtype="auto").to(dtype)
    yield "dense", AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    yield "dense, packed as it is read", SparseModelForCausalLM.from_pretrained(dense, dtype=dtype)


@examples(1)
@given(
    family=st.sampled_from(["llama", "gpt2"]),
    source=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
    form=st.sampled_from(FORMS),
)
@example(family="llama", source=torch.bfloat16, dtype=torch.float32, form="quantised")
@example(family="gpt2", source=torch.bfloat16, dtype=torch.float16, form="head")
def test_all_readers_find_the_same_numbers(family, source, dtype, form):
    """But that numbers of few bits are rounded once, and dense ones first when they are stored."""
    packed, dense = stored(family, source, form)
    expected, rounding = {}, 0 if form == "sparse" else torch.finfo(source).eps
    for reader, model in readings(packed, dense, dtype):
        copied, found = densify(copy.deepcopy(model)).state_dict(), densify(model).state_dict()
        first, of_dense = expected or found, reader.startswith("dense")
        assert found.keys() == first.keys() == copied.keys(), reader
        for name, value in first.items():
            assert found[name].dtype == value.dtype and torch.equal(found[name], copied[name]), (reader, name)
            difference = (found[name].double() - value.double()).abs()
            allowed = rounding * value.double().abs() + 1e-7 if of_dense and rounding else 0
            assert (difference <= allowed).all(), (reader, name)
        expected = first


def test_embeddings_look_up_what_densify_gives():
    packed, _ = stored("llama", torch.bfloat16, "head")
    model, ids = SparseModelForCausalLM.from_pretrained(packed, dtype=torch.float32), torch.arange(8)
    assert torch.equal(model.get_input_embeddings()(ids), densify(model).get_input_embeddings()(ids))


@pytest.mark.parametrize("form", ["quantised", "head"])
def test_a_model_saved_in_another_dtype_keeps_its_numbers(form, tmp_path):
    packed, _ = stored("llama", torch.bfloat16, form)
    model = SparseModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    expected = densify(model).state_dict()
    for name, value in densify(SparseModelForCausalLM.from_pretrained(tmp_path)).state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_integers_in_the_place_of_floats_are_refused_by_all(name, dtype, tmp_path):
    _, dense = stored("llama", torch.float32, "sparse")
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
