"""What may lie, or appear, where something is to be written."""

from pathlib import Path


MODEL = {"config.json": '{"model_type": "llama"}', "model.safetensors": "old", "runs/log": "mine"}


def fill(directory: Path, files: dict[str, str] = MODEL) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def _link(path: Path) -> None:
    fill(path.with_name("elsewhere"), {"notes": "mine"})
    path.symlink_to("elsewhere")


OBSTACLES = {
    "file": lambda path: path.write_text("mine"),
    "directory": lambda path: fill(path, {"notes": "mine"}),
    "model": fill,
    "link": _link,
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


def state(path: Path) -> list[tuple]:
    """A path and all that is below it, each with what tells whether it was replaced or changed."""
    found = [path, *sorted(path.rglob("*"))]
    return [(str(entry), entry.lstat().st_ino, entry.lstat().st_mtime_ns) for entry in found]
