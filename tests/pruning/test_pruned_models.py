import copy

import pytest
import torch
from conftest import make_model

from optimum_neuronal.data.calibration import CalibrationSet
from optimum_neuronal.pruning.calibrating import Pruned, PrunedModels, Tokenizers


def test_tokenizers_of_several_models():
    first, second, tokenizers = make_model("llama"), make_model("llama"), Tokenizers()
    drawn = CalibrationSet(torch.zeros(1, 2, dtype=torch.int64), "text", "stream")
    tokenizers.keep(first, "first's", drawn)
    assert tokenizers.current == tokenizers.of(first) == "first's" and tokenizers.of(second) is None
    assert tokenizers.of(second, drawn) == "first's", "the same model, its weights loaded since"
    assert tokenizers.of(second, copy.copy(drawn)) is None
    tokenizers.keep(second, None)
    assert tokenizers.current is None and tokenizers.of(first) == "first's"
    tokenizers.given = "one for all"
    assert tokenizers.current == tokenizers.of(first) == tokenizers.of(second) == "one for all"


def test_models_are_found_by_what_they_are():
    first, second, pruned = make_model("llama"), make_model("llama"), PrunedModels()
    with pytest.raises(ValueError, match="pruned nothing yet"):
        pruned.find(first, None)
    records = [Pruned(None, {"sparsity": sparsity}, None) for sparsity in (0.5, 0.7)]
    pruned.add(first, records[0])
    pruned.add(second, records[1])
    assert pruned.find(first, {"sparsity": 0.5}) is records[0]
    assert pruned.find(copy.deepcopy(second), {"sparsity": 0.7}) is records[1]
    for model, sparsity_config in (
        (first, {"sparsity": 0.7}),
        (first, None),
        (make_model("llama"), {"sparsity": 0.6}),
    ):
        with pytest.raises(ValueError, match="not as this pruner has left it"):
            pruned.find(model, sparsity_config)


def test_what_is_no_model():
    pruned = PrunedModels()
    pruned.add(make_model("llama"), Pruned(None, {}, None))  # which is gone already
    with pytest.raises(ValueError, match="not as this pruner has left it"):
        pruned.find(make_model("llama"), {"sparsity": 0.7})
    with pytest.raises(TypeError, match="Expected the model that prune.model. returned, got NoneType"):
        pruned.find(None, None)
