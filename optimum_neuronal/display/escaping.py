"""Text that came from elsewhere, made fit to be shown: a file's content steers no terminal and forges no line of a log."""

from typing import Any


def escaped(value: Any, longest: int | None = None) -> str:
    """The text of a value on one line, each character that is not printable escaped as Python does: `\\x1b`, `\\n`.

    Not printable are line ends, control characters, invisible ones that change the direction of writing, and halves of
    surrogate pairs. All other text, of any language, stays as it is.

    Args:
        value: whatever `str()` takes.
        longest (`int`, *optional*): how many characters of it are shown, and that there are more.
    """
    text = str(value)
    if longest is not None and len(text) > longest:
        text = f"{text[:longest]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)
