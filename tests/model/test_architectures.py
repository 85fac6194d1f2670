import pytest

from optimum_neuronal.model.architectures import Architecture, find_architecture


def test_roles_prefer_the_longest_name():
    assert find_architecture("gpt2").find_role("attn.c_proj") == (True, "output")
    assert find_architecture("gpt2").find_role("mlp.c_proj") == (True, "down")
    assert find_architecture("llama").find_role("self_attn.q_proj") == (True, "query")
    assert find_architecture("llama").find_role("self_attn.rotary") == (False, None)
    assert find_architecture("mixtral").find_role("mlp.gate") == (True, None), "known, and never pruned"


def test_parallel_may_depend_on_the_config():
    class Config:
        parallel_attn = True

    assert find_architecture("falcon").is_parallel(Config)
    Config.parallel_attn = False
    assert not find_architecture("falcon").is_parallel(Config)
    assert all(find_architecture(name).is_parallel(Config) for name in ("cohere", "cohere2_moe"))
    assert not find_architecture("llama").is_parallel(Config)


def test_unknown_roles_raise():
    with pytest.raises(ValueError, match="'w1' has the role 'gatee'"):
        Architecture(roles={"w1": "gatee"})
