import pytest
import torch
from conftest import make_model, make_tokenizer

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.data import calibration as data
from optimum_neuronal.pruning import prune as calibrating
from optimum_neuronal.pruning.prune import draw_calibration


TEXT = [" ".join(f"w{(i * 7) % 60}" for i in range(400))]


@pytest.fixture
def asked(monkeypatch):
    """How often a dataset was asked whether it is token ids."""
    calls, original = [], data.as_token_ids

    def as_token_ids(*args):
        calls.append(args)
        return original(*args)

    for module in (data, calibrating):
        monkeypatch.setattr(module, "as_token_ids", as_token_ids)
    return calls


@pytest.fixture
def loaded(monkeypatch):
    """How often a tokenizer was loaded from the model's checkpoint, and from which revision."""
    calls = []

    def from_pretrained(origin, revision):
        calls.append((origin, revision))
        return make_tokenizer()

    monkeypatch.setattr(calibrating.AutoTokenizer, "from_pretrained", from_pretrained)
    return calls


def config(**fields):
    return NeuronALConfig(
        0.7, **{"saliency": "wanda", "dataset": None, "num_samples": 4, "num_alignment_samples": 2, **fields}
    )


def test_token_ids_need_no_tokenizer(llama, ids, asked, loaded):
    calibration = draw_calibration(llama, config(), None, ids)
    assert torch.equal(calibration.ids, ids[:4]) and calibration.drawn_from == "token ids"
    assert calibration.tokenizer is None and not loaded and len(asked) == 1


def test_a_tokenizer_that_was_loaded_is_handed_on(asked, loaded):
    model = make_model("llama", vocab_size=256)
    model.config._name_or_path = "me/llama"
    calibration = draw_calibration(model, config(seq_length=16), None, TEXT, "v2")
    assert calibration.ids.shape == (4, 16) and loaded == [("me/llama", "v2")] and len(asked) == 1
    again = draw_calibration(model, config(seq_length=16), calibration.tokenizer, TEXT)
    assert again.tokenizer is calibration.tokenizer and len(loaded) == 1 and torch.equal(again.ids, calibration.ids)


def test_without_need_nothing_is_drawn(llama, asked, loaded):
    own = make_tokenizer()
    assert draw_calibration(llama, config(saliency="magnitude", topup="uniform"), own, TEXT) is None
    assert not asked and not loaded
