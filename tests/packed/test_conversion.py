import copy
import pickle

import pytest
import torch
from packed_models import assert_same_state, make_zeroed

from optimum_neuronal import densify, sparsify


CONVERSIONS = {
    "double": lambda model: model.double(),
    "to": lambda model: model.to(torch.float64),
    "type": lambda model: model.type(torch.float8_e4m3fn),
    "part": lambda model: model.model.double(),
}


def cloned(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("bits", [{}, {"bits": 4, "embedding_bits": 8}], ids=["sparse", "quantised"])
def test_a_refused_conversion_changes_nothing(bits):
    """Embeddings and norms included, which stand before the first packed weight."""
    model = sparsify(make_zeroed(), **bits)
    for some in (model, copy.deepcopy(model)):
        state = cloned(some)
        for convert in CONVERSIONS.values():
            with pytest.raises(TypeError, match="Packed weights cannot be torch.float"):
                convert(some)
            assert_same_state(some, state)
    assert pickle.loads(pickle.dumps(model)).half().dtype == torch.float16
    assert {value.dtype for value in model.half().state_dict().values()} >= {torch.float16}
    assert densify(model).double().dtype == torch.float64


def test_a_copy_is_converted_by_itself():
    model = sparsify(make_zeroed())
    assert copy.deepcopy(model).half().dtype == torch.float16 and model.dtype == torch.float32
