"""The documentation as tests see it: its pages, their code blocks and their links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n\s*)?^(?P<indent> *)```(?P<language>\w+)?[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])+\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


class Block(NamedTuple):
    """A fenced block: why it is not run (None if it is), its language, and its text without indentation."""

    reason: str | None
    language: str | None
    code: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(path.read_text(encoding="utf-8")):
        code = re.sub(f"^{found['indent']}", "", found["code"], flags=re.M)
        yield Block(found["reason"], found["language"], code)


def prose(path: Path) -> str:
    """The text without its code."""
    return re.sub(r"`[^`\n]+`", "", BLOCK.sub("", path.read_text(encoding="utf-8")))


def links(path: Path) -> Iterator[tuple[str, str | None]]:
    """File and anchor of every link that leads to no other site; the file is empty for one within the page."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        if not re.match(r"\w+:", found["path"]):
            yield found["path"], found["anchor"]


def anchors(path: Path) -> set[str]:
    """Of all headings, made as mkdocs makes them, and of what mkdocstrings documents there."""
    text = BLOCK.sub("", path.read_text(encoding="utf-8"))
    titles = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.+)$", text, re.M))
    named = set(re.findall(r"^::: (\S+)$", text, re.M))
    return named | {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def navigation() -> list[str]:
    """Every page that mkdocs.yml names, in order."""

    def walk(entry) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(inner)

    return list(walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))


def commands(code: str) -> list[list[str]]:
    """The words of every command in a block of sh."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
