"""docs/promises.md: every promise names tests, and every named test exists."""

import ast
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the package is installed without its documentation")


def test_every_promise_names_tests_that_exist():
    rows = re.findall(r"^\| \*\*.+$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 12
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test holds {row[:60]}"
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert name in found, f"{path} has no {name}"
