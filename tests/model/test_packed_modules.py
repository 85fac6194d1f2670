import pytest
from packed_models import make_zeroed

from optimum_neuronal import sparsify
from optimum_neuronal.model.packed_modules import dense_state, packed_modules
from optimum_neuronal.pruning.check_model import check_dense


@pytest.mark.parametrize("family", ["phi", "mixtral", "gpt2"])
def test_the_state_as_if_it_were_dense(family):
    model = make_zeroed(family)
    expected = {name: value.shape for name, value in model.state_dict().items()}
    check_dense(model, "to prune it")
    assert not list(packed_modules(model)) and not dense_state(model)[1]
    sparsify(model)
    state, packed = dense_state(model)
    assert {name: value.shape for name, value in {**state, **packed}.items()} == expected
    assert len(packed) == model.packing.packed and not state.keys() & packed.keys()
    with pytest.raises(ValueError, match=rf"{len(packed)} packed weights.*densify\(model\) first to prune it"):
        check_dense(model, "to prune it")
