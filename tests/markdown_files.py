"""The documentation as tests see it: its pages, code blocks and links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("benchmarks/*.md"))]
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n)?^(?P<indent> *)```(?P<language>\w+)?\n(?P<code>.*?)^(?P=indent)```$",
    re.M | re.S,
)
LINK = re.compile(r"\]\((?!\w+:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")


class Block(NamedTuple):
    """A fenced block: why it is not run (None if it is), its language, and its text."""

    reason: str | None
    language: str | None
    code: str


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(path.read_text(encoding="utf-8")):
        yield Block(found["reason"], found["language"], found["code"])


def links(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield file and anchor of each link within the repository; the file is empty for one within the page."""
    for found in LINK.finditer(BLOCK.sub("", path.read_text(encoding="utf-8"))):
        yield found["path"], found["anchor"]


def anchors(path: Path) -> set[str]:
    """Return the anchors of all headings, as mkdocs makes them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def commands(code: str) -> list[list[str]]:
    """Return the words of every command in a block of sh."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]
