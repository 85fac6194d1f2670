"""The parser of every command: help with examples, and errors that name the closest flag. Imports nothing heavy."""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from ..validation import check_sparsity, did_you_mean


class CommandParser(argparse.ArgumentParser):
    """Tells of an unknown flag with its own usage; `argparse` would leave that to the parser of all commands."""

    def parse_known_args(self, args=None, namespace=None):
        """As `argparse`, but nothing stays unknown."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            known = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(f"unrecognized argument: {flag}.{did_you_mean(flag.partition('=')[0], known)}")
        return namespace, unknown


def describe(parser: argparse.ArgumentParser, usage: str, description: str, examples: Sequence[str]) -> None:
    """Gives the help of a command a usage of one line, a description and examples.

    Args:
        parser: of the command; its name is put in front of the examples.
        usage (`str`): the arguments that it needs.
        description (`str`): what the command does, in a sentence or two.
        examples (`Sequence[str]`): arguments, as they are typed.
    """
    parser.usage = f"{parser.prog} {usage}"
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["examples:", *(f"  {parser.prog} {example}".rstrip() for example in examples)])


def add_verbosity_flags(parser: argparse.ArgumentParser) -> None:
    """What every command understands."""
    parser.add_argument("--quiet", action="store_true", help="show no progress bars and no notes (default: no)")
    parser.add_argument("--debug", action="store_true", help="show where an error comes from (default: no)")


def share(text: str) -> float:
    """A sparsity on the command line, checked before anything heavy is imported.

    Raises:
        `ArgumentTypeError`: it is no number in [0, 1).
    """
    with suppress(ValueError):
        text = float(text)
    try:
        return check_sparsity(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A number of things on the command line.

    Raises:
        `ArgumentTypeError`: it is no whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1.")
    return int(text)


def value_bits(text: str) -> int | None:
    """Bits of kept values on the command line, `none` where they stay as they are; which there are is the config's to say.

    Raises:
        `ArgumentTypeError`: neither a number nor `none`.
    """
    if text.lower() != "none" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bits, such as 4, or none.")
    return int(text) if text.isdecimal() else None


DTYPES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
KNOWN_DTYPES = ("auto", "float32", "bfloat16", "float16")


def dtype(text: str) -> str:
    """A dtype on the command line, under its usual short names too.

    Raises:
        `ArgumentTypeError`: it is none that models are stored in.
    """
    name = DTYPES.get(text.lower(), text.lower()).removeprefix("torch.")
    if name not in KNOWN_DTYPES:
        known = [*KNOWN_DTYPES, *DTYPES]
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected one of {', '.join(KNOWN_DTYPES)}.{did_you_mean(text, known)}"
        )
    return name
