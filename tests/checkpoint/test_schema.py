import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuronal.checkpoint.schema import check
from optimum_neuronal.checkpoint.sparsity_config import load_schema


SHARE = {"type": "number", "minimum": 0, "maximum": 1}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)


@pytest.mark.parametrize(
    "value, schema",
    [
        ({}, {"type": "object"}),
        ([], {"type": "array"}),
        ("", {"type": "string"}),
        (0, {"type": "integer"}),
        (0, {"type": "number"}),
        (0.5, {"type": "number"}),
        (None, {"type": "null"}),
        (False, {"type": "boolean"}),
        (None, {"type": ["number", "null"], "minimum": 0}),
        (0, SHARE),
        (1.0, SHARE),
        (10**400, {"type": "integer", "minimum": 1}),
        ("b", {"enum": ["a", "b"]}),
        (1, {"const": 1}),
        ({"a": 1, "unknown": None}, {"required": ["a"], "properties": {"a": {"type": "integer"}}}),
        ({"a": 0.5}, {"additionalProperties": SHARE}),
        ([1, 2], {"items": {"type": "integer"}}),
        ("anything", {}),
        ("text", {"minimum": 3}),
    ],
)
def test_what_fits(value, schema):
    """Of two fields the error names the one that does not fit."""
    check(value, schema, "x")
    both = {"type": "object", "properties": {"fits": schema, "other": {"type": "string"}}}
    with pytest.raises(ValueError, match="^x.other is 1: expected text.$"):
        check({"fits": value, "other": 1}, both, "x")


@pytest.mark.parametrize(
    "value, schema, message",
    [
        ([], {"type": "object"}, "x is a list of 0: expected an object."),
        ({"a": 1}, {"type": "array"}, "x is an object of 1: expected a list."),
        (True, {"type": "integer"}, "x is True: expected a whole number."),
        (1, {"type": "boolean"}, "x is 1: expected true or false."),
        (1.0, {"type": "integer"}, "x is 1.0: expected a whole number."),
        (False, SHARE, "x is False: expected a number from 0 to 1."),
        (math.nan, SHARE, "x is nan: expected a number from 0 to 1."),
        (math.inf, {"type": "number"}, "x is inf: expected a number."),
        (1.5, SHARE, "x is 1.5: expected a number from 0 to 1."),
        (0, {"type": "integer", "minimum": 1}, "x is 0: expected a number, at least 1."),
        ("a", {"type": ["number", "null"]}, "x is 'a': expected a number or null."),
        ("c", {"enum": ["a", "b"]}, "x is 'c': expected 'a' or 'b'."),
        (2, {"const": 1}, "x is 2: expected 1."),
        ({}, {"required": ["a"]}, "x has no 'a'."),
        ({"a": {"b": "c"}}, {"properties": {"a": {"properties": {"b": SHARE}}}}, "x.a.b is 'c': expected a number from 0 to 1."),
        ({"k": 2}, {"additionalProperties": SHARE}, "x['k'] is 2: expected a number from 0 to 1."),
        ([0, [1, "a"]], {"items": {"items": {"type": "integer"}}}, "x[1][1] is 'a': expected a whole number."),
        (-(10**400), {"type": "integer", "minimum": 1}, "x is a very large number: expected a number, at least 1."),
    ],
)  # fmt: skip
def test_what_does_not_fit(value, schema, message):
    with pytest.raises(ValueError) as caught:
        check(value, schema, "x")
    assert str(caught.value) == message


def test_messages_are_short():
    for value, schema in (("a" * 10**6, SHARE), ({"k" * 10**6: 2}, {"additionalProperties": SHARE})):
        with pytest.raises(ValueError) as caught:
            check(value, schema, "x")
        assert len(str(caught.value)) < 200


@given(JSON)
def test_any_value_fits_or_is_refused(value):
    for schema in (load_schema(), {"type": "object", "additionalProperties": {"items": SHARE}}):
        try:
            check(value, schema, "x")
        except ValueError as error:
            assert str(error).startswith("x")


def test_the_packages_schema_needs_no_more_than_is_understood():
    """What a keyword unknown to `check` forbids, it would let pass."""
    understood = {
        "type",
        "const",
        "enum",
        "minimum",
        "maximum",
        "required",
        "properties",
        "additionalProperties",
        "items",
    }

    def keywords(schema):
        yield from schema
        for inner in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
            if inner is not None:
                yield from keywords(inner)

    assert set(keywords(load_schema())) <= understood | {"$schema", "title", "description"}
