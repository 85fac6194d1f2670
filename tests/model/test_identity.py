import pytest
import torch
from conftest import make_model

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.model.identity import identity


IDS = torch.arange(12).view(3, 4)


def told(model, ids=IDS, **selection):
    return identity(model, find_decoder(model, **selection), ids)


@pytest.fixture
def before(llama):
    return told(llama)


def differs(before, after):
    return [name for name in before if before[name] != after[name]]


def test_the_same_prune_is_known_again(llama, before):
    llama.config._name_or_path, llama.config.transformers_version = "elsewhere", "0.0"
    assert told(make_model("llama")) == told(llama) == before
    assert before["device"] == "cpu" and {len(before[name]) for name in ("model", "calibration data")} == {64}


def test_other_token_ids_are_told(llama, before):
    ids = IDS.clone()
    ids[2, 3] += 1
    assert differs(before, told(llama, ids)) == ["calibration data"]
    assert told(llama, IDS.T.contiguous().T) == before, "however they lie in memory"


@pytest.mark.parametrize("row", [0, -1])
def test_another_weight_is_told(llama, before, row):
    llama.model.layers[2].mlp.down_proj.weight.data[row, 0] += 1
    assert differs(before, told(llama)) == ["model"]


def test_another_config_dtype_or_selection_is_told(llama, before):
    assert differs(before, told(llama, ignore=["k_proj"])) == ["model"]
    llama.config.rms_norm_eps *= 2
    assert differs(before, told(llama)) == ["model"]
    assert differs(before, told(make_model("llama").bfloat16())) == ["model"]
