"""Which files of a directory a comparison has written, so that none that is somebody else's, or was edited, is replaced.

`comparison.sha256` lists them with their SHA-256, as `sha256sum` does.
"""

import hashlib
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ..files.directories import check_writable
from ..files.durable import write_durably


LIST = "comparison.sha256"
LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")

Digests = Mapping[str, Collection[str]]  # name of a file -> SHA-256 of what was written under it


class WrittenFiles:
    """The files of a comparison in a directory.

    Args:
        directory (`str` or `Path`): where they lie; need not exist before they are written.
        overwrite (`bool`): whether files that no comparison has written, or that were edited, may be replaced.
    """

    def __init__(self, directory: str | Path, overwrite: bool = False):
        self.directory, self.overwrite = Path(directory), overwrite

    def is_free(self, name: str) -> bool:
        """Whether there is no such file, or one as a comparison wrote it."""
        return self._is_free(name, self._digests())

    def check(self, names: Collection[str], figures: Collection[str] = ()) -> None:
        """Raises before long work what would keep files from being written; creates nothing.

        Args:
            names (`Collection[str]`): of the files.
            figures (`Collection[str]`): patterns of the names of others, as of `Path.glob`.

        Raises:
            `FileExistsError`: one of them is not as a comparison wrote it, and is not to be overwritten.
            `ValueError`, `OSError`: see [`check_writable`].
        """
        check_writable(self.directory, "write tables to")
        if self.overwrite:
            return
        digests = self._digests()
        drawn = {path.name for pattern in figures for path in self.directory.glob(pattern)}
        for name in sorted({LIST, *names} | drawn):
            if not self._is_free(name, digests):
                raise FileExistsError(
                    f"{self.directory / name} was not written by a comparison, or was edited since: rename it, or choose another "
                    "directory; or overwrite it (overwrite=True, --overwrite), with which what is finished there is run "
                    "again too."
                )

    def write(self, contents: Mapping[str, bytes]) -> list[Path]:
        """Writes files, name -> content, into the directory, which is made if need be, and returns their paths.

        Raises:
            `FileExistsError`, `OSError`: see [`check`].
        """
        self.check(contents)
        self.directory.mkdir(parents=True, exist_ok=True)
        before = self._digests()
        new = {name: (hashlib.sha256(content).hexdigest(),) for name, content in contents.items()}
        # An interrupt leaves some files new and others as they were: until the end, both are known.
        self._list({**before, **{name: {*before.get(name, ()), *digest} for name, digest in new.items()}})
        for name, content in contents.items():
            write_durably(self.directory / name, content)
        self._list({**before, **new})
        return [self.directory / name for name in contents]

    def _is_free(self, name: str, digests: Digests) -> bool:
        path = self.directory / name
        if name == LIST:
            return bool(digests) or not path.exists()
        try:
            return hashlib.sha256(path.read_bytes()).hexdigest() in digests.get(name, ())
        except FileNotFoundError:
            return True

    def _digests(self) -> dict[str, set[str]]:
        """What the list says; nothing if it is no such list."""
        found: dict[str, set[str]] = {}
        with suppress(FileNotFoundError, UnicodeDecodeError):
            for line in (self.directory / LIST).read_text(encoding="utf-8").splitlines():
                entry = LINE.fullmatch(line)
                if entry is None:
                    return {}
                found.setdefault(entry["name"], set()).add(entry["digest"])
        return found

    def _list(self, digests: Digests) -> None:
        lines = [f"{digest}  {name}\n" for name in sorted(digests) for digest in sorted(digests[name])]
        write_durably(self.directory / LIST, "".join(lines).encode())
