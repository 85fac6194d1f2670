"""Text for benchmarks/ladder.py: manuals in six languages, a dictionary, and the source of Python and Rust packages.

The manuals are Debian packages, unpacked in one folder each. In the folder that will hold the run:

    mkdir packages && cd packages && apt-get download $(python -m benchmarks.ladder packages)
    for file in *.deb; do dpkg -x $file ${file%%_*}; done
"""

import fnmatch
import gzip
import hashlib
import html
import importlib.metadata
import platform
import re
import sysconfig
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


BOOKS = "debian-handbook/*/{}/*.html harden-doc/*/{}/*.html installation-guide-amd64/*/{}/*.html"
MANUALS = "debian-reference-{0}/*.html libreoffice-help-{0}/*.html manpages-{0}/*.gz"
SOURCES = {  # kind: patterns of files, each below the folder of a package
    "english": "aptitude-doc-en/*.html debian-policy/*.txt debian-reference-en/*.html developers-reference/*.html "
    "dict-gcide/*.dz fortunes/*.u8 git-doc/*.txt libreoffice-help-en-us/*.html linux-doc-6.1/*.rst.gz manpages/*.gz "
    "manpages-dev/*.gz perl-doc/*.pod postgresql-doc-15/*.html python3.11-doc/*.txt rust-doc/*/book/*.html "
    "rust-doc/*/nomicon/*.html rust-doc/*/reference/*.html rust-doc/*/rust-by-example/*.html sqlite3-doc/*.html "
    "vim-doc/*.html " + BOOKS.format("en*", "en*", "en"),
    "languages": "aptitude-doc-es/*.html aptitude-doc-fr/*.html developers-reference-de/*.html "
    "developers-reference-fr/*.html fortunes-de/*.u8 fortunes-es/*.fortunes libreoffice-help-pt-br/*.html "
    "manpages-pt-br/*.gz "
    + " ".join(MANUALS.format(language) for language in ("de", "es", "fr", "it"))
    + " "
    + " ".join(
        BOOKS.format(f"{language}-*", f"{language}-*", language) for language in ("de", "es", "fr", "it", "pt")
    ),
    "code": "rust-doc/*/src/*.html",
}
LIBRARIES = ("matplotlib", "networkx", "nltk", "numpy", "pandas", "pygments", "scipy", "sklearn", "sympy")
SKIP = {
    "__pycache__",
    "_antlr",
    "cjkencodings",
    "data",
    "encodings",
    "pydoc_data",
    "site-packages",
    "stdarch",
    "tests",
}
SKIP |= {"print.html", "translations"}  # tables and code written by programs; pages said elsewhere, other scripts
SHARE, PIECE, REPEATED = 50, 60_000, 60  # parts by a hash modulo; characters of a document; and of a paragraph


class Document(NamedTuple):
    kind: str  # "english", "languages" or "code"
    name: str
    text: str


def package_names() -> list[str]:
    """Return the names of the Debian packages."""
    return sorted({pattern.partition("/")[0] for patterns in SOURCES.values() for pattern in patterns.split()} - {""})


def versions(packages: Path) -> dict[str, str]:
    """Return the versions of the Debian packages, told by the names of their files, and of the Python packages."""
    found = (file.name.split("_")[:2] for file in sorted(packages.glob("*.deb")))
    debian = {name: urllib.parse.unquote(version) for name, version in found if name in package_names()}
    names = {name: {"sklearn": "scikit-learn"}.get(name, name) for name in LIBRARIES}
    python = {name: importlib.metadata.version(name) for name in names.values()}
    return {"python": platform.python_version(), **python, **debian}


def files(packages: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield the kind, the name and the path of every file, each file once, in the same order on every machine."""
    paths = sysconfig.get_paths()
    roots = [("stdlib", Path(paths["stdlib"]))] + [(name, Path(paths["purelib"]) / name) for name in LIBRARIES]
    for library, root in roots:
        for path in sorted(root.rglob("*.py")):
            if not SKIP & set(path.relative_to(root).parts):
                yield "code", f"{library}/{path.relative_to(root).as_posix()}", path
    patterns = [(kind, pattern) for kind, patterns in SOURCES.items() for pattern in patterns.split()]
    for package in package_names():
        own = [(kind, pattern) for kind, pattern in patterns if pattern.startswith(f"{package}/")]
        for path in sorted((packages / package).rglob("*")):
            name = path.relative_to(packages).as_posix()
            kinds = [kind for kind, pattern in own if fnmatch.fnmatchcase(name, pattern)]
            if kinds and not SKIP & set(Path(name).parts) and path.is_file():
                yield kinds[0], name, path


def read(path: Path) -> str:
    """Return the text of a file, without the marks of HTML and of manual pages."""
    content = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    text = content.decode("utf-8", errors="replace").replace("\r", "")
    if path.suffix == ".html":
        text = without_tags(text)
    elif re.search(r"\.\d\w*\.gz$", path.name):
        text = without_macros(text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


def without_tags(text: str) -> str:
    """Return the text of an HTML page: a blank line between blocks, and line breaks only where it is preformatted."""
    text = re.sub(r"(?is)<!--.*?-->|<(head|script|style|nav|svg|form|button)\b.*?</\1>", "", text)
    text = re.sub(r'(?is)<pre class="line-numbers">.*?</pre>', "", text)
    parts = re.split(r"(?is)(<pre\b.*?</pre>)", text)
    parts[::2] = [re.sub(r"\s+", " ", part) for part in parts[::2]]
    text = re.sub(r"(?i) *<(br|/?li|/?tr|/?dt|/?dd)\b[^>]*> *", "\n", "".join(parts))
    text = re.sub(r"(?i) *</?(p|pre|div|h\d|[uod]l|table|section|article|blockquote|body)\b[^>]*> *", "\n\n", text)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def without_macros(text: str) -> str:
    """Return the text of a manual page, without what only sets its type."""
    text = re.sub(r"(?m)^['.] *\\\".*\n", "", text)
    text = re.sub(r"(?m)^\.(?:SH|SS|Sh|Ss) *(.*)$", r"\n\1\n", text)
    text = re.sub(r"(?m)^\.(?:PP|P|LP|TP|IP|Pp|sp)\b.*$", "", text)
    text = re.sub(r"(?m)^\.(?:B|I|R|S)[BIRM]? +(.*)$", lambda found: found[1].replace('"', ""), text)
    text = re.sub(r"(?m)^[.'].*\n", "", text)
    text = re.sub(r"\\f(?:\(..|\[.*?\]|.)|\\s[-+]?\d|\\[&/,|^%:c]", "", text)
    text = re.sub(r"\\\(aq|\\\[aq\]", "'", text)
    text = re.sub(r"\\(?:\(..|\[.*?\]|\*\(..|\*\[.*?\])", "", text)
    return re.sub(r"\\(.)", lambda found: {"e": "\\", "~": " ", "0": " "}.get(found[1], found[1]), text)


def part_of(document: Document) -> str:
    """Return "train", "calibration" or "heldout".

    A page of a manual is told by its file's own name, so that its translations, which may quote it, share a part.
    """
    name = document.name if document.kind == "code" else document.name.rpartition("/")[2]
    return {0: "heldout", 1: "calibration"}.get(hashlib.sha256(name.encode()).digest()[0] % SHARE, "train")


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:12]


def pieces(document: Document) -> Iterator[Document]:
    """Yield a long document in pieces that end between paragraphs, named by their number."""
    start, number = 0, 0
    while start < len(document.text):
        end = document.text.find("\n\n", start + PIECE)
        end = end if end >= 0 else len(document.text)
        name = document.name if len(document.text) <= PIECE else f"{document.name}#{number}"
        yield Document(document.kind, name, document.text[start:end].strip("\n"))
        start, number = end, number + 1


def read_all(packages: Path) -> dict[str, list[Document]]:
    """Read every document, by part, in the order of their names' hashes.

    A paragraph of some length is kept where it is first met: in the held-out documents, then the calibration ones, then
    the training ones. So no training document holds a paragraph of a held-out one.
    """
    parts: dict[str, list[Document]] = {"heldout": [], "calibration": [], "train": []}
    for kind, name, path in files(packages):
        for document in pieces(Document(kind, name, read(path))):
            parts[part_of(document)].append(document)
    seen: set[bytes] = set()
    for part, documents in parts.items():
        kept = []
        for document in sorted(documents, key=lambda document: digest(document.name)):
            paragraphs = []
            for paragraph in document.text.split("\n\n"):
                key = digest(paragraph)
                if len(paragraph) < REPEATED or key not in seen:
                    paragraphs.append(paragraph)
                    seen.add(key)
            if len(text := "\n\n".join(paragraphs).strip("\n")) > 200:
                kept.append(document._replace(text=text))
        parts[part] = kept
    return parts
