import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.common.registry import Registry, parse_method
from optimum_neuronal.common.validation import did_you_mean
from optimum_neuronal.saliency import SALIENCIES, Saliency, register_saliency


def test_unknown_name_suggests_the_closest():
    with pytest.raises(ValueError, match="Unknown saliency 'wnada'. Did you mean 'wanda'?"):
        SALIENCIES.get("wnada")
    assert did_you_mean("zzz", ["wanda"]) == ""


def test_a_name_is_registered_once():
    registry = Registry("thing", "optimum_neuronal.saliency")

    @registry.register("one")
    class First:
        pass

    assert registry.get("one") is First and First.name == "one"
    with pytest.raises(ValueError, match="'one' is taken by .*First"):

        @registry.register("one")
        class Second:
            pass


def test_nobody_takes_a_name_of_ours_by_a_class_of_the_same_name():
    wanda = SALIENCIES.get("wanda")
    with pytest.raises(ValueError, match="'wanda' is taken by optimum_neuronal.saliency.wanda.Wanda"):
        register_saliency("wanda")(type("Wanda", (Saliency,), {"__module__": "mine", "score": None}))
    assert SALIENCIES.get("wanda") is wanda and NeuronALConfig(0.5, "wanda").methods.saliency == wanda()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owl", ("owl", {})),
        ("owl:lam=0.1,m=7", ("owl", {"lam": 0.1, "m": 7})),
        (
            "neuronal:steps=block, block_lambdas=[0.1,0.2]",
            ("neuronal", {"steps": "block", "block_lambdas": [0.1, 0.2]}),
        ),
        ("x:a=True,b='c,d'", ("x", {"a": True, "b": "c,d"})),
    ],
)
def test_methods_with_hyper_parameters(text, expected):
    assert parse_method(text) == expected


def test_bad_hyper_parameters_raise():
    for text in ["owl:", "owl:m", "owl:m=", "owl:=1", "owl:1a=2", "owl:1"]:
        with pytest.raises(ValueError, match="expected NAME or NAME:KEY=VALUE"):
            parse_method(text)
