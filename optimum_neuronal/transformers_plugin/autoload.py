"""A start-up file of Python that lets every process of an environment load packed checkpoints.

Python executes the lines of `.pth` files in its folders of packages that begin with `import`. The one written here waits
until transformers is looked for, and imports this package then. It needs no other module, takes microseconds, and does
nothing once the package is uninstalled.
"""

import os
import site
import sysconfig
from pathlib import Path

from ..files.atomic import write_durably


FILE = "optimum_neuronal_autoload.pth"
CODE = """
import sys
class WaitsForTransformers:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            try:
                sys.meta_path.remove(self)
                import optimum_neuronal
            except Exception:
                pass  # transformers is imported all the same
sys.meta_path.insert(0, WaitsForTransformers())
"""
CONTENT = f"# `optimum-cli neuronal register --off` removes this file.\nimport sys; exec({CODE.strip()!r}, {{}})\n"


def find_files() -> list[Path]:
    """Return the start-up files in the folders that Python reads; none if packed checkpoints need an import."""
    return [path for folder in _folders() if (path := folder / FILE).is_file()]


def switch_on() -> None:
    """Write the start-up file: beside the package, else into the environment, else into the user's folder.

    Raises:
        `OSError`: no such folder may be written.
    """
    folders = _folders()
    preferred = [Path(__file__).resolve().parents[2], Path(sysconfig.get_path("purelib"))]
    for folder in [*(folder for folder in preferred if folder in folders), *folders]:
        if _is_writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / FILE, CONTENT.encode())
            return
    raise PermissionError(
        f"None of {', '.join(map(str, folders))} may be written: use a virtual environment, or write `import optimum_neuronal` "
        "in your program."
    )


def switch_off() -> None:
    """Remove all start-up files. Raise `OSError` if one may not be removed."""
    for path in find_files():
        path.unlink(missing_ok=True)


def _folders() -> list[Path]:
    """Return the folders whose `.pth` files this Python executes; that of the user last, where it is read."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return list(dict.fromkeys(Path(folder) for folder in [*site.getsitepackages(), *user]))


def _is_writable(folder: Path) -> bool:
    """Return True if files may be written into a folder, or it may be made."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK)
