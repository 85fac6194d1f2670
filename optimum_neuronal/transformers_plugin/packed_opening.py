"""While a packed checkpoint is loaded, transformers opens its files by [`PackedFile`], and all others as it would.

transformers reads files by a function that it holds in a global name, and has no hook around the reading. So that name
is replaced while loads are under way, and put back by the last one, whatever becomes of it.
"""

import os
import threading
import weakref
from collections.abc import Callable

from ..checkpoint.names import SUFFIX
from ..checkpoint.packed_reading import PackedFile
from ..compat import transformers as internals


class PackedOpening:
    """The time from when the files of one load are known until all of them were opened, or the load is over otherwise.

    transformers has no hook for a load that fails in between. So the end comes with the first of: the last file is
    opened; [`~PackedOpening.end`]; the owner is no longer in use.

    Args:
        files (`list[PackedFile]`): of the checkpoint.
        owner: what lives as long as the load: the quantizer.

    Attributes:
        paths (`list[str]`): for transformers, in place of the files' own.
    """

    def __init__(self, files: list[PackedFile], owner: object):
        self.paths = [_PackedPath(file, self) for file in files]
        self._unopened = set(files)
        _under_way.add(self)
        weakref.finalize(owner, _under_way.discard, self).atexit = False

    @property
    def is_complete(self) -> bool:
        """Whether every file has been opened."""
        return not self._unopened

    def opened(self, file: PackedFile) -> None:
        """Takes note that a file was opened."""
        self._unopened.discard(file)
        if self.is_complete:
            self.end()

    def end(self) -> None:
        """Ends it, if it has not ended."""
        _under_way.discard(self)


class _PackedPath(str):
    """The path of a packed file, for [`_Opener`] alone: anyone else is told that there is no such file."""

    file: PackedFile
    opening: PackedOpening

    def __new__(cls, file: PackedFile, opening: PackedOpening):
        hint = f"{file.path} (packed: only to be read memory-mapped, without disable_mmap=True){SUFFIX}"
        path = super().__new__(cls, hint)
        path.file, path.opening = file, opening
        return path


class _Opener:
    """Stands in for what transformers opens files with; differs from it for packed files only.

    Each knows what was there before it, so that one whom somebody has wrapped meanwhile still works when its time is over.
    """

    def __init__(self, before: Callable):
        self.before = before

    def __call__(self, path: str | os.PathLike, *args, **kwargs):
        if not isinstance(path, _PackedPath):
            return self.before(path, *args, **kwargs)
        path.opening.opened(path.file)
        return path.file


class _UnderWay:
    """The loads of this process, in all threads, whose files are not all open: the first brings an opener, the last takes it.

    A finalizer may call [`~_UnderWay.discard`] at any line of the same thread, hence a lock that this thread may take
    again, and an order of lines in which that does no harm.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._loads: set[PackedOpening] = set()
        self._opener: _Opener | None = None

    def add(self, load: PackedOpening) -> None:
        with self._lock:
            self._loads.add(load)
            if self._opener is None:
                before = internals.get_file_opener()
                if isinstance(before, _Opener):  # whoever had wrapped an earlier one has put it back
                    before = before.before
                self._opener = _Opener(before)
                internals.set_file_opener(self._opener)

    def discard(self, load: PackedOpening) -> None:
        """Puts back what the first load had found, unless somebody has put something else there since."""
        with self._lock:
            self._loads.discard(load)
            if self._loads or self._opener is None:
                return
            opener, self._opener = self._opener, None
            if internals.get_file_opener() is opener:
                internals.set_file_opener(opener.before)


_under_way = _UnderWay()
