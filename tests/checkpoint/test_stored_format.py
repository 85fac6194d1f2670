import pytest

from optimum_neuronal.checkpoint.stored_format import QUANTIZATION_CONFIG, check_packed, stored_format


def test_the_format_is_told_by_the_quantization_config():
    assert stored_format({"quantization_config": dict(QUANTIZATION_CONFIG)}, {"format": "packed"}) == "packed"
    assert stored_format({"quantization_config": {"quant_method": "gptq"}}, None) == "dense"
    assert stored_format({"quantization_config": [1]}, None) == stored_format({}, {"format": "dense"}) == "dense"
    for config, told in (({}, "packed"), ({"quantization_config": dict(QUANTIZATION_CONFIG)}, "dense")):
        with pytest.raises(ValueError, match=f"contradicts itself: sparsity_config.format is '{told}'"):
            stored_format(config, {"format": told})


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": 4},
        {"version": "1"},
        {"version": True},
        {"version": 1.0},
        {"format": None},
        {"version": [[]]},
    ],
)
def test_another_version_or_format(change):
    with pytest.raises(ValueError, match=r"but this optimum_neuronal reads 'packed', version 1: install another one"):
        check_packed({**QUANTIZATION_CONFIG, **change})
    with pytest.raises(ValueError, match="install another one"):
        stored_format({"quantization_config": {**QUANTIZATION_CONFIG, **change}}, None)
