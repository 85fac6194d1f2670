"""Adds the repository's other texts and its notebooks to the site, and turns links to code into names.

In the repository every link is relative to its file. On the site, a link to a page leads to the page. A link to any other
file, such as a module, becomes the file's path: where the repository is published is not known yet.
"""

import json
import os
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FURTHER = (
    "README.md",  # the home page
    "examples/*.ipynb",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
)
LINK = re.compile(r"\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
NAME = re.compile(r"\[(<code>[\w.~]+</code>)\]")  # as docstrings in transformers' style refer to something
TYPE = re.compile(r"<code>[^<]*`[^<]*")  # a docstring's type in Markdown, which mkdocstrings takes for code


def page_name(path: Path) -> str:
    """Return the name of a file's page on the site; a notebook's page ends in .md."""
    return path.relative_to(ROOT).as_posix().replace(".ipynb", ".md")


def further_pages() -> dict[str, Path]:
    """Return the files of all pages that lie outside of docs/, by their names on the site."""
    found = (path for pattern in FURTHER for path in sorted(ROOT.glob(pattern)))
    return {page_name(path): path for path in found}


def read_page(path: Path) -> str:
    """Return a file's Markdown; of a notebook its text and its code, without outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)


def on_files(files, config):
    for name, path in further_pages().items():
        files.append(File.generated(config, name, content=read_page(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    origin = further_pages().get(page.file.src_uri, DOCS / page.file.src_uri)
    return LINK.sub(lambda link: _on_the_site(link, origin, page.file.src_uri), markdown)


def on_page_content(html, page, config, files):
    html = NAME.sub(lambda name: name[1].replace("~", ""), html)
    return TYPE.sub(lambda match: re.sub("[`*]", "", match[0]), html)


def _on_the_site(link: re.Match, origin: Path, page: str) -> str:
    """Return the link on the site; a broken link is left unchanged, so that mkdocs reports it."""
    target = (origin.parent / link["path"]).resolve()
    if not target.exists():
        return link[0]
    inside = target.is_relative_to(DOCS)
    name = target.relative_to(DOCS).as_posix() if inside else page_name(target)
    if inside or name in further_pages():
        relative = os.path.relpath(name, Path(page).parent).replace(os.sep, "/")
        return f"[{link['text']}]({relative}{link['anchor'] or ''})"
    return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"
