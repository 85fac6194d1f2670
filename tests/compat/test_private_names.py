"""Only `compat/` touches private names of other libraries."""

import ast
from pathlib import Path

import optimum_neuronal


PACKAGE = Path(optimum_neuronal.__file__).parent
LOOK_UPS = {"getattr", "hasattr", "setattr", "delattr"}
ALLOWED = {"_ActionsContainer"}  # a type of argparse, for annotations


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def named_here(tree: ast.AST) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, and attributes of `self`."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return names | {node.attr for node in stored if ast.unparse(node.value) in ("self", "cls")}


def private_uses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and name of each private attribute, also in `getattr` and its like."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            uses.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in LOOK_UPS:
            constants = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            uses += [(node.lineno, value) for value in constants if is_private(value)]
    return uses


def test_only_compat_touches_private_names_of_other_libraries():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    own = ALLOWED.union(*(named_here(tree) for path, tree in trees.items() if path.parent.name != "compat"))
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path, tree in trees.items()
        if path.parent.name != "compat"
        for line, name in private_uses(tree)
        if name not in own
    ]
    assert not wrong
