from types import SimpleNamespace

from conftest import make_model

from optimum_neuronal.model.experts import experts_per_token, is_of_experts
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


def test_experts_per_token():
    for config, expected in (
        (dict(num_experts_per_tok=2), 2),
        (dict(num_experts_per_tok=None, moe_topk=[1, 4, 2]), 4),
        (dict(moe_k=3), 3),
        (dict(num_experts_per_tok=0), None),
        (dict(), None),
    ):
        assert experts_per_token(SimpleNamespace(**config)) == expected
