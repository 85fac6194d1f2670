"""A directory that is written anew appears as a whole: whatever happens meanwhile, it holds all of the old or of the new.

The new directory is written beside the old one, in a *staging* directory, and the two are exchanged. Linux and macOS
exchange two directories in one step. Where the system or the disk cannot, two renamings follow each other: a kill
between them leaves no directory under the name, and the next save puts the old one back before anything else.

Some directories are not exchanged: a mount point, one whose parent may not be written, the working directory (a shell
would be left in the old one), one that holds other disks, thousands of files or what may not be read, one whose owner,
group or extended attributes this process may not give to another. There the files
are replaced one by one, a file without which the directory is nothing being taken away first and put back last: a kill
meanwhile leaves a directory that is visibly incomplete, never a mixture of old and new that looks whole.
"""

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .durable import directory_to_disk, tree_to_disk
from .locking import locked
from .scratch import free_name, left_over, scratch_directory


CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
MOST_ENTRIES = 10_000  # in a directory that is exchanged, since each gets a second name
SAVING, BEFORE = "saving", "before"  # what directories beside it are called: the new one, and the old one for a moment


@contextmanager
def replaced_directory(directory: str | Path, belongs: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yields an empty staging directory; when the block ends, it takes the directory's place.

    An exception in the block leaves the directory as it was, and nothing beside it. What killed processes have left
    beside the directory is removed first.

    Args:
        directory (`str` or `Path`): may exist or not; of a symbolic link, the directory that it points to.
        belongs (`Callable[[str], bool]`):
            Whether a file's name is of what is replaced. All other files and all folders of the old directory, the
            user's own, are found in the new one too, unless it has some of the same name.
        last (`str`): name of the file without which the directory is nothing.

    Raises:
        `OSError`: the disk is full, or may not be written.
    """
    path = Path(os.path.realpath(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    _put_back(path, path.parent)
    inside = path.is_dir() and not _can_be_exchanged(path)
    with scratch_directory(path if inside else path.parent, _stem(path, SAVING)) as staging:
        if path.exists() and not inside:
            _make_alike(staging, path)  # first: the files in it may inherit a group or an access list
        yield staging
        tree_to_disk(staging)
        _check_kinds(staging, path)
        if inside:
            _replace_files(staging, path, belongs, last)
        elif path.exists():
            _keep_others(path, staging, belongs)
            directory_to_disk(staging)
            _exchange(staging, path)  # so that the context removes the old directory
        else:
            staging.rename(path)
        directory_to_disk(path.parent)


def _can_be_exchanged(path: Path) -> bool:
    here = Path(os.path.realpath(os.curdir))
    writable = os.access(path.parent, os.W_OK | os.X_OK)
    free = writable and path not in (here, *here.parents) and not _is_mounted(path)
    return free and _can_be_linked(path) and _can_be_made_alike(path)


def _can_be_made_alike(path: Path) -> bool:
    """Whether a directory made anew may get the owner, the group, the mode and the extended attributes of this one."""
    with suppress(OSError), scratch_directory(path.parent, _stem(path, SAVING)) as trial:
        _make_alike(trial, path)
        return _manner(trial) == _manner(path)
    return False


def _make_alike(new: Path, old: Path) -> None:
    """Raises `OSError` where the owner or the group may not be given."""
    if hasattr(os, "chown"):
        about = old.stat()
        os.chown(new, about.st_uid, about.st_gid)
    shutil.copystat(old, new)


def _manner(directory: Path) -> tuple:
    """Owner, group, mode and extended attributes, access lists among them."""
    about, attributes = directory.stat(), {}
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # a disk that has none
            attributes = {name: os.getxattr(directory, name) for name in os.listxattr(directory)}
    return about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode), attributes


def _can_be_linked(path: Path) -> bool:
    """Whether all that a directory holds may get a second name: it lies on one disk, may be read, and is not too much."""
    disk, count = path.stat().st_dev, 0
    pending = [path]
    with suppress(PermissionError):
        while pending:
            entries = list(os.scandir(pending.pop()))
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
            pending += folders
            count += len(entries)
            if count > MOST_ENTRIES or any(folder.stat().st_dev != disk for folder in folders):
                return False
        return True
    return False


def _is_mounted(path: Path) -> bool:
    with suppress(OSError):  # Linux tells of directories, too, that are mounted within one disk
        escaped = "".join(f"\\{ord(sign):03o}" if sign in "\\ \t\n" else sign for sign in str(path))
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return escaped in {line.split()[4] for line in mounts}
    return os.path.ismount(path)


def _put_back(path: Path, place: Path) -> None:
    """Puts back what a save was killed over between its two renamings, or removes it."""
    for before in left_over(place, _stem(path, BEFORE)):
        with locked(before) as free:
            if free is not False and not path.exists():
                before.rename(path)
            elif free:
                shutil.rmtree(before, ignore_errors=True)


def _stem(path: Path, kind: str) -> str:
    return f".{path.name}.{kind}"


def _check_kinds(new: Path, old: Path) -> None:
    """Raises `FileExistsError` if a file would take a folder's place, or a folder a file's."""
    for entry in list(os.scandir(new)):
        place = old / entry.name
        if place.exists() and place.is_dir() != entry.is_dir():
            kind = "folder" if place.is_dir() else "file"
            raise FileExistsError(f"{place} is a {kind} in the way: rename it or choose another directory")


def _keep_others(old: Path, new: Path, belongs: Callable[[str], bool]) -> None:
    """Brings what is not replaced into the new directory: as further names of the same files, else as copies."""
    for entry in list(os.scandir(old)):
        target = new / entry.name
        is_folder = entry.is_dir(follow_symlinks=False)
        if os.path.lexists(target) or (belongs(entry.name) and not is_folder):
            continue
        if is_folder:
            shutil.copytree(entry.path, target, symlinks=True, copy_function=_link)
        elif entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))
        else:
            _link(entry.path, target)


def _link(source: str, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links, or someone else's file
        shutil.copy2(source, target)


def _exchange(new: Path, old: Path) -> None:
    """Exchanges two directories, in one step where the system can."""
    if _exchange_at_once(new, old):
        return
    before = free_name(old.parent, _stem(old, BEFORE))
    with locked(old):
        old.rename(before)
        try:
            new.rename(old)
        except OSError:
            before.rename(old)
            raise
        before.rename(new)


def _exchange_at_once(one: Path, other: Path) -> bool:
    """Whether it could be done. Raises `OSError` for reasons that have nothing to do with what the system can."""
    library = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
    names = os.fsencode(one), os.fsencode(other)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        result = library.renameat2(here, names[0], here, names[1], ctypes.c_uint(exchange))
    elif sys.platform == "darwin" and hasattr(library, "renamex_np"):
        result = library.renamex_np(*names, ctypes.c_uint(2))  # RENAME_SWAP
    else:
        return False
    code = ctypes.get_errno()
    if result != 0 and code not in CANNOT_EXCHANGE:
        raise OSError(code, os.strerror(code), str(other))
    return result == 0


def _replace_files(staging: Path, path: Path, belongs: Callable[[str], bool], last: str) -> None:
    """For a directory that cannot be exchanged; `staging` lies in it."""
    new = sorted(os.listdir(staging), key=lambda name: name == last)
    (path / last).unlink(missing_ok=True)
    for entry in list(os.scandir(path)):
        if entry.is_file() and belongs(entry.name) and entry.name not in new:
            os.unlink(entry.path)
    for name in new:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        os.replace(staging / name, path / name)
    directory_to_disk(path)
