"""The model card as a file: written with a seal, so that one whom somebody has edited, or written, is never replaced.

The seal is the last line, a comment that readers of Markdown do not see, with the SHA-256 of all text above it.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .names import MODEL_CARD, SPARE_MODEL_CARD


SEAL = "<!-- Written by optimum_neuronal. Unedited if this is the SHA-256 of the text above: {digest} -->\n"
SEALED = re.compile(r"(.*)" + SEAL.format(digest="([0-9a-f]{64})"), re.S)


def seal(card: str) -> str:
    """The card with its seal."""
    text = card.rstrip("\n") + "\n\n"
    return text + SEAL.format(digest=_digest(text))


def is_unedited(card: str) -> bool:
    """Whether a card is as this package wrote it."""
    found = SEALED.fullmatch(_with_plain_ends(card))
    return found is not None and _digest(found[1]) == found[2]


def changed(card: str, how: Callable[[str], str]) -> str:
    """The card with its text changed, sealed anew if it was unedited."""
    if not is_unedited(card):
        return how(card)
    return seal(how(SEALED.fullmatch(_with_plain_ends(card))[1]))


def name_for_card(directory: Path) -> str:
    """The name under which a new card replaces nothing but an unedited one: README.md, else MODEL_CARD.md.

    Raises:
        `FileExistsError`: neither is free.
    """
    for name in (MODEL_CARD, SPARE_MODEL_CARD):
        if may_be_replaced(directory / name):
            return name
    raise FileExistsError(
        f"{directory} holds {MODEL_CARD} and {SPARE_MODEL_CARD}, both edited or of another make: rename one of them, so that "
        "the model card has a place."
    )


def may_be_replaced(path: Path) -> bool:
    """Whether there is no such file, or one that is a card as this package wrote it."""
    with suppress(FileNotFoundError):
        try:
            return is_unedited(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError:
            return False
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _with_plain_ends(text: str) -> str:
    """As it was before git, or an editor that changed nothing else, gave it the line ends of another system."""
    return text.replace("\r\n", "\n")
