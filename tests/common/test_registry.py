import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.common.registry import Registry, parse_method
from optimum_neuronal.common.validation import hyper
from optimum_neuronal.saliency import SALIENCIES, Saliency, register_saliency
from optimum_neuronal.topup import TOPUPS
from optimum_neuronal.topup.owl import OWL, AuthorsOWL


@dataclass(frozen=True)
class First:
    variant: ClassVar[str] = "first"


class Second(First):
    pass


def test_names_and_variants_are_registered_once():
    registry = Registry("thing", "optimum_neuronal.saliency")
    for variant, cls in ((None, First), (None, First), ("second", Second)):
        assert registry.register("one", variant)(cls) is cls
    assert registry.get("one") is First and First.name == "one" and registry.names() == ["one"]
    assert type(registry.make("one", "args", {"variant": "second"})) is Second
    for variant, message in (
        (None, "name 'one' is taken by .*First"),
        ("second", "variant 'second' of 'one' is taken"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.register("one", variant)(type("Third", (First,), {}))


def test_nobody_takes_a_name_of_ours_by_a_class_of_the_same_name():
    wanda = SALIENCIES.get("wanda")
    with pytest.raises(ValueError, match="'wanda' is taken by optimum_neuronal.saliency.wanda.Wanda"):
        register_saliency("wanda")(type("Wanda", (Saliency,), {"__module__": "mine", "score": None}))
    assert SALIENCIES.get("wanda") is wanda and NeuronALConfig(0.5, "wanda").methods.saliency == wanda()


def test_a_variant_is_chosen_by_name():
    for values, expected in (({}, OWL), ({"variant": "corrected"}, OWL), ({"variant": "authors"}, AuthorsOWL)):
        topup = TOPUPS.make("owl", "topup_args", {**values, "half_width": 0.1})
        assert topup == expected(half_width=0.1) and topup.name == "owl"
    assert TOPUPS.names().count("owl") == 1 and TOPUPS.get("owl") is OWL
    for name, values, message in (
        ("neuronal", {"variant": "autors"}, "one of 'sequence', 'authors', 'printed'. Did you mean 'authors'?"),
        ("dlp", {"variant": "authors"}, "topup_args has 'variant': the top-up 'dlp' takes half_width."),
        ("owl", {"half": 1}, "the top-up 'owl' (variants: corrected, authors) takes outlier_factor, half_width."),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            TOPUPS.make(name, "topup_args", values)


def test_types_of_fields_may_be_text():
    """As after `from __future__ import annotations`."""
    for values, right in (({"widths": [0.1, 0.2]}, True), ({"count": 2.5}, False)):
        registry = Registry("thing", "optimum_neuronal.saliency")
        names = {"widths": "tuple[float, ...]", "count": "int"}
        body = {"__annotations__": names, "widths": hyper((0.1,), 0, 1), "count": hyper(3, 1), "variant": "own"}
        registry.register("one")(dataclass(type("One", (), body)))
        with nullcontext() if right else pytest.raises(TypeError, match="count is 2.5"):
            assert registry.make("one", "args", values).widths == (0.1, 0.2)


def test_methods_with_hyperparameters():
    for text, expected in (
        ("owl", ("owl", {})),
        ("owl:lam=0.1,m=7", ("owl", {"lam": 0.1, "m": 7})),
        ("neuronal:steps=block, lam=[0.1,0.2]", ("neuronal", {"steps": "block", "lam": [0.1, 0.2]})),
        ("x:a=True,b='c,d'", ("x", {"a": True, "b": "c,d"})),
        ("neuronal:reference=sparse-stream,steps=row", ("neuronal", {"reference": "sparse-stream", "steps": "row"})),
    ):
        assert parse_method(text) == expected
    for text in ("owl:", "owl:m", "owl:m=", "owl:=1", "owl:1a=2", "owl:1"):
        with pytest.raises(ValueError, match="expected NAME or NAME:KEY=VALUE"):
            parse_method(text)
