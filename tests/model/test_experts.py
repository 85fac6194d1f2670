from conftest import make_model

from optimum_neuronal.model.experts import is_of_experts
from optimum_neuronal.model.find_blocks import find_decoder


def test_weights_of_experts_are_told_by_role_and_shape():
    """A convolution's weight has three dimensions too."""
    for family in ("llama", "jamba", "mixtral", "gpt_oss", "llama4_text", "granitemoe", "lfm2"):
        model = make_model(family)
        decoder = find_decoder(model)
        weights = {
            name for name, weight in model.named_parameters()
            if is_of_experts(decoder.architecture.find_role(name)[1], weight.ndim)
        }  # fmt: skip
        projections = [p for block in decoder.blocks for p in block.projections.values() if p.expert is not None]
        assert weights == {p.group for p in projections}
        assert bool(weights) == (family not in ("llama", "lfm2"))
