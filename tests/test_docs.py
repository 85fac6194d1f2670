"""The documentation: every page is found, every link leads somewhere, and all that is public is told of.

mkdocs checks the same of the site that it builds (`make docs`); this needs no mkdocs.
"""

import ast
import inspect
import re
from dataclasses import MISSING, fields

import pytest
from markdown_files import DOCS, PAGES, ROOT, TEXTS, anchors, blocks, commands, links, name_of, navigation, prose

import optimum_neuronal
from optimum_neuronal import NeuronALConfig
from optimum_neuronal.cli.neuronal_command import NeuronalCommand
from optimum_neuronal.config.config_fields import RECIPES, explain
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package is installed without its documentation")
METHODS = [("saliency", SALIENCIES, name) for name in SALIENCIES.names()]
METHODS += [("topup", TOPUPS, name) for name in TOPUPS.names()]


def test_every_page_is_in_the_navigation_once():
    named = navigation()
    assert len(named) == len(set(named))
    assert {path.relative_to(DOCS).as_posix() for path in PAGES} <= set(named)
    for name in named:
        assert any(path.exists() for path in (DOCS / name, ROOT / name, (ROOT / name).with_suffix(".ipynb"))), name


def test_links_lead_somewhere():
    for path in TEXTS:
        for target, anchor in links(path):
            file = (path.parent / target).resolve() if target else path
            assert file.is_relative_to(ROOT.resolve()) and file.exists(), f"{target} does not exist"
            if anchor:
                assert anchor in anchors(file), f"{target} has no heading #{anchor}"


def test_every_public_name_is_told_of():
    for name in optimum_neuronal.__all__:
        found = getattr(optimum_neuronal, name)
        assert isinstance(found, str) or inspect.getdoc(found), f"{name} has no docstring"
        told = (DOCS / "reference.md").read_text()
        where = {"register_saliency": "Registry.register", "register_topup": "Registry.register"}.get(name)
        assert f"::: optimum_neuronal.{name}\n" in told or (f"### {name}\n" in told and (where or name) in told)


def test_every_method_has_its_page():
    """It tells formula or idea, source, cost, defaults, and when the method wins and loses."""
    for room, registry, name in METHODS:
        text = (DOCS / "methods" / room / f"{name}.md").read_text()
        for entry in fields(registry.get(name)):
            assert f"| `{entry.name}` | `{entry.default!r}` |" in text, f"{entry.name} is {entry.default!r}"
        for title in ("## Source", "## Cost", "## When it wins, and when it loses"):
            assert title in text, title
        assert f"{room}/{name}.md" in (DOCS / "methods" / "index.md").read_text()


def test_no_page_tells_of_a_method_that_is_gone():
    pages = {(path.parent.name, path.stem) for path in (DOCS / "methods").glob("*/*.md")}
    assert pages == {(room, name) for room, _, name in METHODS}


def test_recipes_are_configs_and_told_of():
    for path in RECIPES.iterdir():
        config = NeuronALConfig.from_json_file(path)
        assert config == NeuronALConfig.from_json_file(path.stem), "also by its name, wherever one is"
        assert (config.sparsity or config.bits_per_weight) and config == NeuronALConfig.from_dict(config.to_dict())
        assert f"recipes/{path.name})" in (DOCS / "choose.md").read_text()


def test_every_command_is_told_of():
    told = (DOCS / "commands.md").read_text()
    for command in NeuronalCommand.SUBCOMMANDS:
        assert f"\n## {command.name}\n" in told, command.name


def test_every_block_that_is_not_run_says_why():
    for path in (*PAGES, ROOT / "README.md"):
        assert "```" not in prose(path), f"{name_of(path)} has a block that does not end"
        for block in blocks(path):
            assert block.language, f"{name_of(path)} has a block of no language: name one, or `text`"
            if block.language == "sh" and not block.reason:
                for words in commands(block.code):
                    assert words[:2] == ["optimum-cli", "neuronal"], (
                        f"{name_of(path)}: {words} is not run by the tests"
                    )


def test_messages_that_are_explained_are_there():
    """Every message of docs/troubleshooting.md is in the code, `…` standing for what differs."""
    told = "\n".join(texts_of(path) for path in (ROOT / "optimum_neuronal").rglob("*.py"))
    messages = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    assert len(messages) > 30
    for message in messages:
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("…"))
        assert re.search(pattern, told), f"no error says {message!r}"


def texts_of(path) -> str:
    """Every text in a file's code, a line each; what is filled in is `{}`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in found)


def test_every_field_of_the_config_is_explained_with_its_default():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    for entry in fields(NeuronALConfig):
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        row = f"| `{entry.name}` | `{default!r}` | {explain(entry)} |"
        assert f"{row}\n" in text, f"docs/reference.md lacks this row: {row}"


def test_every_figure_is_shown():
    shown = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    for path in (DOCS / "figures").iterdir():
        assert f"figures/{path.name})" in shown, path.name
