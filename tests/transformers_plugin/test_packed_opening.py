import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import make_model
from transformers import LlamaForCausalLM, modeling_utils

from optimum_neuronal import NeuronALConfig, NeuronALPruner, save_pretrained
from optimum_neuronal.checkpoint.packed_reading import PackedFile
from optimum_neuronal.transformers_plugin.packed_loading import PackedOpening, _Opener


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A packed llama in several files."""
    folder = tmp_path_factory.mktemp("packed") / "llama"
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    model = NeuronALPruner(config).prune(make_model("llama"))
    save_pretrained(model, folder, "packed", max_shard_size=20_000)
    assert len(list(folder.glob("packed-*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def as_it_was():
    """After every test, transformers opens files with what it had before."""
    before = modeling_utils.safe_open
    yield before
    gc.collect()
    found, modeling_utils.safe_open = modeling_utils.safe_open, before
    assert found is before


def assert_same(model, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def before_opening(monkeypatch, call):
    """Has `call(opening)` come before each load's first file is opened."""
    opened, seen = PackedOpening.opened, set()

    def watched(self, file):
        if self not in seen:
            seen.add(self)
            call(self)
        opened(self, file)

    monkeypatch.setattr(PackedOpening, "opened", watched)


def test_what_was_there_is_put_back_when_all_files_are_open(packed, as_it_was, monkeypatch):
    found = []
    read = PackedFile.get_slice
    monkeypatch.setattr(PackedFile, "get_slice", lambda *args: found.append(modeling_utils.safe_open) or read(*args))
    model = LlamaForCausalLM.from_pretrained(packed)
    assert modeling_utils.safe_open is as_it_was
    assert isinstance(found[0], _Opener) and found[-1] is as_it_was, "while files are opened, and no longer"
    assert_same(LlamaForCausalLM.from_pretrained(packed), model)


def test_what_somebody_else_has_put_there_before(packed, monkeypatch, as_it_was):
    paths = []

    def theirs(path, *args, **kwargs):
        paths.append(path)
        return as_it_was(path, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_open", theirs)
    LlamaForCausalLM.from_pretrained(packed)
    assert modeling_utils.safe_open is theirs and not paths


def fail_to_open(monkeypatch, packed):
    LlamaForCausalLM.from_pretrained(packed, disable_mmap=True)


def fail_between_files(monkeypatch, packed):
    monkeypatch.setattr(PackedFile, "keys", lambda file: 1 / 0)
    LlamaForCausalLM.from_pretrained(packed)


def fail_before_files(monkeypatch, packed):
    monkeypatch.setattr(LlamaForCausalLM, "_load_pretrained_model", lambda *args, **kwargs: 1 / 0)
    LlamaForCausalLM.from_pretrained(packed)


def be_interrupted(monkeypatch, packed):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedOpening, "opened", interrupt)
    LlamaForCausalLM.from_pretrained(packed)


def fail_to_unpack(monkeypatch, packed):
    def damaged(*args):
        assert not isinstance(modeling_utils.safe_open, _Opener), "put back before weights are read"
        raise ValueError("damaged")

    monkeypatch.setattr("optimum_neuronal.checkpoint.packed_reading.unpack", damaged)
    LlamaForCausalLM.from_pretrained(packed)


def fail_on_the_model(monkeypatch, packed):
    LlamaForCausalLM.from_pretrained(packed, ignore_mismatched_sizes=True, hidden_size=64)


def fail_to_find_files(monkeypatch, packed):
    monkeypatch.setattr("optimum_neuronal.transformers_plugin.packed_loading.open_checkpoint", lambda path: 1 / 0)
    LlamaForCausalLM.from_pretrained(packed)


FAILURES = [
    fail_to_open, fail_between_files, fail_before_files, be_interrupted, fail_to_unpack, fail_on_the_model,
    fail_to_find_files,
]  # fmt: skip


@pytest.mark.parametrize("fail", FAILURES)
def test_a_load_that_fails_leaves_nothing_behind(fail, packed, dense, as_it_was, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises((Exception, KeyboardInterrupt)):
        fail(patch, packed)
    gc.collect()
    assert modeling_utils.safe_open is as_it_was
    assert_same(LlamaForCausalLM.from_pretrained(dense), make_model("llama"))
    LlamaForCausalLM.from_pretrained(packed)


def in_a_thread(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_a_load_in_another_thread_within_a_load(kind, packed, dense, monkeypatch, request):
    folder = request.getfixturevalue(kind)
    expected, inner, outer = LlamaForCausalLM.from_pretrained(folder), [], []

    def load_another(opening):
        outer.append(opening)
        if len(outer) == 1:
            inner.append(in_a_thread(lambda: LlamaForCausalLM.from_pretrained(folder)))
            assert isinstance(modeling_utils.safe_open, _Opener), "it is still needed"

    before_opening(monkeypatch, load_another)
    model = LlamaForCausalLM.from_pretrained(packed)
    assert_same(inner[0], expected)
    monkeypatch.undo()
    assert_same(model, LlamaForCausalLM.from_pretrained(packed))


def test_two_loads_that_overlap(packed, monkeypatch, as_it_was):
    """The first to begin is the first to end."""
    expected = LlamaForCausalLM.from_pretrained(packed)
    begun, go_on, order = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()], []

    def wait(opening):
        order.append(opening)
        number = len(order) - 1
        begun[number].set()
        assert go_on[number].wait(60)

    before_opening(monkeypatch, wait)
    with ThreadPoolExecutor(2) as pool:
        loads = []
        for number in range(2):
            loads.append(pool.submit(LlamaForCausalLM.from_pretrained, packed))
            assert begun[number].wait(60)
        go_on[0].set()
        assert_same(loads[0].result(60), expected)
        assert modeling_utils.safe_open is not as_it_was
        go_on[1].set()
        assert_same(loads[1].result(60), expected)
    assert modeling_utils.safe_open is as_it_was


def test_a_load_that_failed_does_not_end_the_other(packed, monkeypatch):
    """While its error is still held, and when it is let go."""
    with pytest.raises(FileNotFoundError) as held:
        LlamaForCausalLM.from_pretrained(packed, disable_mmap=True)
    errors = [held]
    del held
    assert isinstance(modeling_utils.safe_open, _Opener)

    def let_go(opening):
        errors.clear()
        gc.collect()
        assert isinstance(modeling_utils.safe_open, _Opener)

    before_opening(monkeypatch, let_go)
    LlamaForCausalLM.from_pretrained(packed)
    assert not errors


def test_what_somebody_else_puts_there_meanwhile_stays(packed, dense, monkeypatch, as_it_was):
    """And works, and what is under it is not called in a circle."""
    paths, wrapped = [], []

    def wrap(opening):
        wrapped.append(modeling_utils.safe_open)

        def theirs(path, *args, **kwargs):
            paths.append(path)
            return wrapped[0](path, *args, **kwargs)

        modeling_utils.safe_open = theirs

    with monkeypatch.context() as patch:
        before_opening(patch, wrap)
        expected = LlamaForCausalLM.from_pretrained(packed)
    theirs = modeling_utils.safe_open
    assert theirs.__name__ == "theirs" and len(paths) > 1
    assert_same(LlamaForCausalLM.from_pretrained(dense), make_model("llama"))
    assert_same(LlamaForCausalLM.from_pretrained(packed), expected)
    assert modeling_utils.safe_open is theirs
    modeling_utils.safe_open = wrapped[0]
    assert_same(LlamaForCausalLM.from_pretrained(dense), make_model("llama"))
    assert_same(LlamaForCausalLM.from_pretrained(packed), expected)
    assert modeling_utils.safe_open is as_it_was
