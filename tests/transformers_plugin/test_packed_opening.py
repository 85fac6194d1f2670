"""Packed files are opened in place of the function that transformers opens files with, which all others still get."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors
import torch
from conftest import make_model
from sparse import make_sparse
from transformers import LlamaForCausalLM, modeling_utils

from optimum_neuronal import save_pretrained
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.transformers_plugin import packed_loading


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed llama in several files."""
    folder = tmp_path_factory.mktemp("packed") / "llama"
    save_pretrained(make_sparse("llama"), folder, "packed", max_shard_size=20_000)
    assert len(list(folder.glob("packed-*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    make_model("llama").save_pretrained(folder)
    return folder


def assert_same(model, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def check_loads(packed, dense, expected):
    assert_same(LlamaForCausalLM.from_pretrained(dense), make_model("llama"))
    assert_same(LlamaForCausalLM.from_pretrained(packed), expected)


def test_what_somebody_else_puts_there_works_before_after_and_between_loads(packed, dense, monkeypatch):
    """Dense files go through all functions, and none is called in a circle; a second load puts nothing more there."""
    first, paths = modeling_utils.safe_open, []

    def wrap(inner):
        def theirs(path, *args, **kwargs):
            paths.append(path)
            return inner(path, *args, **kwargs)

        return theirs

    with monkeypatch.context() as patch:
        patch.setattr(modeling_utils, "safe_open", wrap(first))
        expected = LlamaForCausalLM.from_pretrained(packed)
        assert not paths
        opener = modeling_utils.safe_open
        check_loads(packed, dense, expected)
        assert len(paths) == 1 and modeling_utils.safe_open is opener
        patch.setattr(modeling_utils, "safe_open", wrap(opener))
        check_loads(packed, dense, expected)
        assert len(paths) == 3
    assert modeling_utils.safe_open is first
    check_loads(packed, dense, expected)


def fail(*args, **kwargs):
    raise ZeroDivisionError


def interrupt(*args):
    raise KeyboardInterrupt


# Loads that fail before, between and after files: what is replaced, by what, and the arguments.
FAILURES = (
    (None, None, {"disable_mmap": True}),
    (None, None, {"ignore_mismatched_sizes": True, "hidden_size": 64}),
    ((PackedFile, "keys"), fail, {}),
    ((PackedFile, "get_slice"), interrupt, {}),
    ((LlamaForCausalLM, "_load_pretrained_model"), fail, {}),
    ((packed_loading, "open_checkpoint"), fail, {}),
)


def test_a_load_that_fails_changes_no_later_one(packed, dense, monkeypatch):
    monkeypatch.setattr(modeling_utils, "safe_open", lambda *args, **kwargs: safetensors.safe_open(*args, **kwargs))
    before, expected = modeling_utils.safe_open, LlamaForCausalLM.from_pretrained(packed)
    for replaced, function, arguments in FAILURES:
        with monkeypatch.context() as patch, pytest.raises((Exception, KeyboardInterrupt)):
            if replaced is not None:
                patch.setattr(*replaced, function)
            LlamaForCausalLM.from_pretrained(packed, **arguments)
        gc.collect()
        assert modeling_utils.safe_open is before
        check_loads(packed, dense, expected)


def load_in_another_thread(paths) -> list:
    with ThreadPoolExecutor(1) as pool:
        return list(pool.map(LlamaForCausalLM.from_pretrained, paths, timeout=60))


def load_in_this_thread(paths) -> list:
    return list(map(LlamaForCausalLM.from_pretrained, paths))


@pytest.mark.parametrize("load", [load_in_another_thread, load_in_this_thread])
def test_loads_while_one_is_under_way(load, packed, dense, monkeypatch):
    before, read = modeling_utils.safe_open, PackedFile.get_slice
    expected, inner, openers = LlamaForCausalLM.from_pretrained(packed), [], []

    def watched(*args):
        if not inner:
            inner.append(None)
            openers.append(modeling_utils.safe_open)
            inner[:] = load([packed, dense])
            openers.append(modeling_utils.safe_open)
        return read(*args)

    monkeypatch.setattr(PackedFile, "get_slice", watched)
    assert_same(LlamaForCausalLM.from_pretrained(packed), expected)
    assert openers[0] is openers[1] is not before and modeling_utils.safe_open is before
    assert_same(inner[0], expected)
    assert_same(inner[1], make_model("llama"))
