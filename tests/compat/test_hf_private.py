import pytest
import torch
from conftest import make_model
from safetensors.torch import load_file

from optimum_neuronal.compat import hf_private


@pytest.mark.parametrize("family, overrides", [("mixtral", {}), ("llama", {"tie_word_embeddings": True})])
def test_stored_tensors_are_what_save_pretrained_writes(family, overrides, tmp_path):
    model = make_model(family, **overrides)
    model.save_pretrained(tmp_path)
    written, found = (
        load_file(tmp_path / "model.safetensors"),
        hf_private.as_stored(model, hf_private.untied(model, model.state_dict())),
    )
    assert found.keys() == written.keys()
    assert all(torch.equal(found[name], value) for name, value in written.items())
