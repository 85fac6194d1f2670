import pytest
from torch import nn

from optimum_neuronal.model.selection import Patterns, Recorded


ABOUT = {
    "block_sparsity": {"model.layers.0": 0.5, "model.layers.2": 0.5},
    "projections": {"mlp.up_proj": {}, "mlp.experts.*.down_proj": {}},
    "left_out": ["model.layers.2.mlp.up_proj", "model.layers.0.mlp.experts.3.down_proj"],
}


@pytest.mark.parametrize("blocks", ["model.layers", "layers", "language_model.model.layers"])
def test_recorded_names_are_compared(blocks):
    recorded = Recorded(ABOUT, blocks)
    taken = ["0.mlp.up_proj", "0.mlp.experts.1.down_proj", "2.mlp.experts.3.down_proj"]
    others = ["1.mlp.up_proj", "2.mlp.up_proj", "0.mlp.experts.3.down_proj", "0.mlp.upXproj", "0.mlp.up_proj.weight"]
    assert all(recorded.takes(f"{blocks}.{name}") and recorded.targets_it(f"{blocks}.{name}") for name in taken)
    assert all(recorded.ignores(f"{blocks}.{name}") and not recorded.takes(f"{blocks}.{name}") for name in others)
    assert not recorded.takes("lm_head")
    recorded.check(nn.Module(), 3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_sparsity": {"model.layers.0": 0.5, "other.layers.1": 0.5}}, "names 'other.layers.1': expected blocks of 'model.layers'"),
        ({"block_sparsity": {"model.layers.7": 0.5}}, "block_sparsity names '7', which the model does not have: load"),
        ({"projections": {"mlp.up_proj": {}, "mlp.gone": {}}}, r"projections names 'mlp.gone', which the model does not have"),
        ({"block_sparsity": {}, "projections": {}}, "block_sparsity names no projection: load the model as it was pruned; or del"),
    ],
)  # fmt: skip
def test_what_the_model_does_not_have(change, message):
    with pytest.raises(ValueError, match=message):
        recorded = Recorded({**ABOUT, **change}, "model.layers")
        count = recorded.takes("model.layers.0.mlp.up_proj") + recorded.takes("model.layers.2.mlp.up_proj")
        recorded.check(nn.Module(), count)


def test_patterns_are_searched_and_have_to_match():
    patterns = Patterns(["mlp"], ["layers.0."])
    assert patterns.takes("layers.1.mlp.up_proj") and not patterns.takes("layers.0.mlp.up_proj")
    assert not patterns.takes("layers.1.q_proj")
    patterns.check(nn.Module(), 1)
    with pytest.raises(ValueError, match="leave no projection to prune"):
        patterns.check(nn.Module(), 0)
    with pytest.raises(ValueError, match=r"match no projection: \['typo'\]"):
        Patterns(["typo"], None).check(nn.Module(), 1)
