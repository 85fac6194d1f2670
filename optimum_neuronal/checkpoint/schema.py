"""Checks JSON values against the keywords of JSON Schema that this package's schema uses.

The library jsonschema takes 1.0 for an integer and NaN for a number, and quotes values at any length in its messages.
"""

import math
from collections.abc import Mapping
from typing import Any


TYPES = {
    "object": (dict, "an object"),
    "array": (list, "a list"),
    "string": (str, "text"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "null": (type(None), "null"),
    "boolean": (bool, "true or false"),
}


def check(value: Any, schema: Mapping[str, Any], where: str) -> None:
    """Raise `ValueError` if a value does not fit; keys that the schema does not know are admitted.

    Args:
        value: as `json.loads` returns it.
        schema (`Mapping`): understood are `type`, `const`, `enum`, `minimum`, `maximum`, `required`, `properties`,
            `additionalProperties` as a schema, and `items`. Neither NaN nor infinity is a number.
        where (`str`): name of the value in messages.
    """
    kinds, expected = schema.get("type", []), None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        expected = " or ".join(TYPES[kind][1] for kind in kinds) + _range(schema)
    elif "const" in schema and value != schema["const"]:
        expected = repr(schema["const"])
    elif "enum" in schema and value not in schema["enum"]:
        expected = " or ".join(map(repr, schema["enum"]))
    elif _is(value, "number") and not schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf):
        expected = "a number" + _range(schema)
    if expected is not None:
        raise ValueError(f"{where} is {short(value)}: expected {expected}.")
    if isinstance(value, dict):
        if missing := [key for key in schema.get("required", []) if key not in value]:
            raise ValueError(f"{where} has no {missing[0]!r}.")
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            check(item, known.get(key, others), f"{where}.{key}" if key in known else f"{where}[{short(key)}]")
    if isinstance(value, list):
        for index, item in enumerate(value):
            check(item, schema.get("items", {}), f"{where}[{index}]")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"  # though Python takes it for a number
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, TYPES[kind][0])


def _range(schema: Mapping[str, Any]) -> str:
    if "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    return f", at least {schema['minimum']}" if "minimum" in schema else ""


def short(value: Any) -> str:
    """Return a value as text, at a length that fits a message."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**50 else "a very large number"
    return text if len(text) <= 80 else f"{text[:77]}..."
