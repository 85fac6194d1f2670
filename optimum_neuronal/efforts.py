"""How much work a prune is worth, in a word: what the config's fields are where they are not given.

The command line shows these too: nothing heavy is imported here.
"""

from typing import Any


# docs/reconstruction.md has time and quality of each.
EFFORTS: dict[str, dict[str, Any]] = {
    "fast": {"saliency": "alps", "topup": "owl", "refit_epochs": 0},
    "default": {"saliency": "alps", "topup": "search", "refit_epochs": 0},
    "best": {"saliency": "alps", "topup": "search", "refit_epochs": 20},
}


UNIFORM = "uniform"  # goes together with a pattern


def default_topup(effort: str, pattern: str | None) -> str:
    """Name of the top-up where none is given.

    Args:
        effort (`str`): of `EFFORTS`.
        pattern (`str`, *optional*): the config's.
    """
    return EFFORTS[effort]["topup"] if pattern is None else UNIFORM


def told(name: str) -> str:
    """What a field is for every effort, in words: `"alps"`, or `"20 with effort best, else 0"`."""
    values = {effort: fields[name] for effort, fields in EFFORTS.items()}
    usual = values["default"]
    others = [f"{value} with effort {effort}" for effort, value in values.items() if value != usual]
    return ", ".join([*others, f"else {usual}"]) if others else str(usual)
