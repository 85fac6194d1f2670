import pytest
import torch
from conftest import make_model

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.files.records import work_directory
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.context import open_records


def opened(directory, **fields):
    model = make_model("llama")
    with work_directory(directory) as folder:
        config = NeuronALConfig(**{"sparsity": 0.7, **fields})
        return open_records(folder, find_decoder(model), config, torch.zeros(2, 4, dtype=torch.int64))


def test_what_changes_no_mask_may_change(tmp_path):
    opened(tmp_path / "work", batch_size=1).put("block-00000", 1, {})
    assert opened(tmp_path / "work", batch_size=2, format="packed").get("block-00000")[0] == 1
    with pytest.raises(ValueError, match="begun otherwise: seed was 0, is 1"):
        opened(tmp_path / "work", seed=1)
