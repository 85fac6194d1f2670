"""Conversations as text: lists of messages, each with a role and a content, by the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


MESSAGES = "messages"  # what the column of conversations is called


def is_conversation(entry: Any) -> bool:
    """Whether an entry of a dataset is a list of messages, and not a text."""
    return (
        isinstance(entry, (list, tuple))
        and len(entry) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in entry)
    )


@dataclass(frozen=True)
class Conversations(Sequence):
    """Conversations that are made into text when they are asked for. Their text holds all special tokens.

    Args:
        entries (`Sequence`): lists of messages; one in memory is checked at once.
        tokenizer (`PreTrainedTokenizerBase`): whose chat template makes the text.
        source (`str`): where they come from, for errors.

    Raises:
        `ValueError`: no tokenizer, or one without a chat template; a conversation that the template refuses.
        `TypeError`: an entry is no conversation.
    """

    entries: Sequence
    tokenizer: Any
    source: str

    def __post_init__(self):
        if getattr(self.tokenizer, "chat_template", None) is None:
            lacking = "no tokenizer was given" if self.tokenizer is None else "the tokenizer has none"
            raise ValueError(
                f"The dataset ({self.source}) holds conversations, which a chat template makes into text, and {lacking}: set "
                "tokenizer.chat_template, or pass text."
            )
        if isinstance(self.entries, list):
            for index, entry in enumerate(self.entries):
                self._check(index, entry)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> str:
        entry = self.entries[index]
        self._check(index, entry)
        try:
            return self.tokenizer.apply_chat_template(entry, tokenize=False)
        except ImportError:
            raise
        except Exception as error:  # whatever a template says: roles that do not take turns, a content of another kind
            raise ValueError(
                f"Document {index} of {self.source} does not go through the tokenizer's chat template: {error}"
            ) from error

    def _check(self, index: int, entry: Any) -> None:
        if not is_conversation(entry):
            raise TypeError(
                f"Document {index} of {self.source} is no conversation, as the first one is: expected a list of messages, each "
                "with 'role' and 'content'."
            )
