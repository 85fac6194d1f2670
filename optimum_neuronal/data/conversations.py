"""Conversations as text: a chat template renders them."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import ProcessorMixin


PAIR = ("prompt", "completion")  # columns that hold a conversation together
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names; others are kept
MESSAGES = "a list of messages, such as {'role': 'user', 'content': 'Hello'}"


def are_conversations(entries: Iterable[Any]) -> bool:
    """Return True if the first entry that is not None is a list of messages, or a row with several columns."""
    first = next((entry for entry in entries if entry is not None), None)
    return isinstance(first, Mapping) or isinstance(first, (list, tuple)) and isinstance((*first, {})[0], Mapping)


def find_template(tokenizer: Any, source: str) -> Any:
    """Return the processor or tokenizer that has a chat template, or raise `ValueError`."""
    for one in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if getattr(one, "chat_template", None):
            return one
    raise ValueError(
        f"The dataset ({source}) holds conversations, but there is no tokenizer with a chat template: pass one, set "
        "tokenizer.chat_template, or pass text."
    )


def render(entry: Any, template: Any, document: str) -> str:
    """Return a conversation as text, or raise `ValueError` that names the document."""
    messages = _messages_of(entry, document)
    if isinstance(template, ProcessorMixin):  # their templates read parts of text and images
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    try:
        return template.apply_chat_template(messages, tokenize=False) if messages else ""
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"The chat template does not accept {document}. Change or remove this conversation, or set another "
            f"tokenizer.chat_template. ({error})"
        ) from error


def _messages_of(entry: Any, document: str) -> list[dict[str, Any]]:
    if isinstance(entry, Mapping) and entry.keys() >= {*PAIR}:
        turns = zip(("user", "assistant"), (entry[name] for name in PAIR))
        parts = [
            turn if isinstance(turn, (list, tuple)) else [{"role": role, "content": turn}] for role, turn in turns
        ]
        entry = [message for part in parts for message in part]
    if not isinstance(entry, (list, tuple)):
        raise ValueError(f"Expected {MESSAGES}, but {document} is {_short(entry)}.")
    return [_message_of(message, f"Message {number} of {document}") for number, message in enumerate(entry)]


def _message_of(message: Any, name: str) -> dict[str, Any]:
    """Return a message with a role and text, without keys whose value is None."""
    found = dict(message) if isinstance(message, Mapping) else {}
    if found.get("from") is not None:  # ShareGPT
        found = {"role": ROLES.get(str(found["from"]), found["from"]), "content": found.get("value")}
    if found.get("tool_calls"):
        found["content"] = found.get("content") or ""
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        found["content"] = content = "".join(part.get("text") or "" for part in content)
    if not isinstance(found.get("role"), str) or not isinstance(content, str):
        raise ValueError(f"{name} is {_short(message)}: expected a role and content, both text.")
    return {key: value for key, value in found.items() if value is not None}


def _short(value: Any) -> str:
    return textwrap.shorten(repr(value), 100)
