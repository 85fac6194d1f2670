"""What `make docs` does beside mkdocs: takes in the repository's other texts, and turns links to code into names.

In the repository every link is relative to its file. On the site, a link to a page leads to the page, and one to a file
that is no page, such as a module, becomes the file's path: where the repository is published is not known yet.
"""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FURTHER = ("benchmarks/*.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
NO_PAGES = {"benchmarks/methods.head.md"}  # a part of another
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
NAME = re.compile(r"\[(<code>[\w.~]+</code>)\]")  # as docstrings in transformers' style refer to something
TYPE = re.compile(r"<code>[^<]*`[^<]*")  # as they tell a type, Markdown that mkdocstrings takes for code


def further_pages() -> dict[str, Path]:
    """Name on the site -> file, of all pages that lie outside of docs/."""
    found = (path for pattern in FURTHER for path in sorted(ROOT.glob(pattern)))
    return {name: path for path in found if (name := path.relative_to(ROOT).as_posix()) not in NO_PAGES}


def on_files(files, config):
    for name, path in further_pages().items():
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    origin = further_pages().get(page.file.src_uri, DOCS / page.file.src_uri)
    return LINK.sub(lambda link: _on_the_site(link, origin, page.file.src_uri), markdown)


def on_page_content(html, page, config, files):
    html = NAME.sub(lambda name: name[1].replace("~", ""), html)
    return TYPE.sub(lambda told: re.sub("[`*]", "", told[0]), html)


def _on_the_site(link: re.Match, origin: Path, page: str) -> str:
    """Return the link on the site; a broken link is left unchanged, so that mkdocs reports it."""
    target = (origin.parent / link["path"]).resolve()
    if not target.exists():
        return link[0]
    inside = target.is_relative_to(DOCS)
    name = target.relative_to(DOCS if inside else ROOT).as_posix()
    if inside or name in further_pages():
        relative = os.path.relpath(name, Path(page).parent).replace(os.sep, "/")
        return f"[{link['text']}]({relative}{link['anchor'] or ''})"
    return link["text"] if name in link["text"] else f"{link['text']} (`{name}`)"
