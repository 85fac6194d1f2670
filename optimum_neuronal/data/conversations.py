"""Conversations: what a row of a dataset says, and its text by a chat template."""

import json
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import ProcessorMixin

from .token_windows import text_tokenizer


CHATS = ("messages", "conversations")  # columns that hold conversations
PAIR = {"prompt": "user", "completion": "assistant"}  # columns that hold a conversation together -> their roles
TOOLS = "tools"  # column beside them, of lists of tools or their JSON
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names; others are kept
MESSAGES = "a list of messages, such as {'role': 'user', 'content': 'Hello'}"


def are_conversations(entries: Iterable[Any]) -> bool:
    """Return True if the first entry that is not None is a list of messages, or a row with several columns."""
    first = next((entry for entry in entries if entry is not None), None)
    return isinstance(first, Mapping) or isinstance(first, (list, tuple)) and isinstance((*first, {})[0], Mapping)


def find_template(tokenizer: Any, source: str | None = None) -> Any:
    """Return the processor or tokenizer that has a chat template, or None. Raise if `source`, which holds chats, needs one."""
    for one in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        template = getattr(one, "chat_template", None)
        if isinstance(template, dict) and "default" not in template:
            raise ValueError(
                f"The tokenizer's chat templates are named {', '.join(template)}: save the one to use as chat_template.jinja "
                "in the model's directory."
            )
        if template:
            return one
    if source is not None:
        name = Path(getattr(tokenizer, "name_or_path", "")).name
        raise ValueError(
            f"The dataset ({source}) holds conversations, but the tokenizer{name and f' of {name}'} has no chat template: set "
            "tokenizer.chat_template, name the model's chat version, or pass text."
        )
    return None


def render(entry: Any, template: Any, document: str, **options: Any) -> tuple[str, int]:
    """Return a conversation as text, and how many turns and lists of tools the chat template leaves out of it.

    `options` are those of `apply_chat_template`. Raise `ValueError` that names the document.
    """
    messages, tools = conversation_of(entry, document)

    def apply(messages: list[dict[str, Any]], tools: dict[str, Any]) -> str:
        if isinstance(template, ProcessorMixin):  # their templates read parts of text and images
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        return template.apply_chat_template(messages, tokenize=False, **tools, **options) if messages else ""

    try:
        text = apply(messages, tools)
    except Exception as error:  # a template may raise anything
        raise ValueError(
            f"The chat template does not accept {document}. Change or remove this conversation, add `tools` if the template "
            f"needs them, or set another tokenizer.chat_template. ({error})"
        ) from error
    lost, emptied = 0, [(messages, {})] if tools else []
    for number, message in enumerate(messages):
        if message["role"] not in ROLES.values() or message.get("tool_calls") or not message["content"]:
            empty = {"role": message["role"], "content": ""}
            emptied.append(([*messages[:number], empty, *messages[number + 1 :]], tools))
    for without in emptied:
        with suppress(Exception):
            lost += apply(*without) == text
    return text, lost


def encode_prompt(tokenizer: Any, prompt: Any, name: str = "a prompt") -> list[int]:
    """Return the token ids that an answer to a text or a conversation follows. Without a chat template, texts are continued."""
    template = find_template(tokenizer, None if isinstance(prompt, str) else "prompts")
    if template is None:
        return text_tokenizer(tokenizer)(prompt)["input_ids"]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if [message["role"] for message in conversation_of(chat, name)[0]][-1:] in ([], ["assistant"]):
        raise ValueError(f"The last turn of {name} is the assistant's: expected one that the model can answer.")
    text, _ = render(chat, template, name, add_generation_prompt=True)
    return text_tokenizer(tokenizer)(text, add_special_tokens=False)["input_ids"]


def conversation_of(entry: Any, document: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages of a conversation, and `{"tools": ...}` if it has some. Raise `ValueError` if it is malformed."""
    tools = entry.get(TOOLS) if isinstance(entry, Mapping) else None
    if isinstance(entry, Mapping) and entry.keys() >= {*PAIR}:
        parts = [(entry[name], [{"role": role, "content": entry[name]}]) for name, role in PAIR.items()]
        entry = [message for part, turn in parts for message in (part if isinstance(part, (list, tuple)) else turn)]
    elif isinstance(entry, Mapping):
        entry = next((entry[name] or [] for name in (*CHATS, *entry) if name in entry and name != TOOLS), [])
    if not isinstance(entry, (list, tuple)):
        raise ValueError(f"Expected {MESSAGES}, but {document} is {textwrap.shorten(repr(entry), 100)}.")
    messages = [_message_of(message, f"Message {number} of {document}") for number, message in enumerate(entry)]
    if messages and not any("content" in message or "tool_calls" in message for message in messages):
        raise ValueError(f"Expected {MESSAGES}, but no message of {document} has content.")
    try:
        tools = _without_nulls(json.loads(tools.strip() or "null") if isinstance(tools, str) else tools)
    except ValueError as error:
        raise ValueError(f"The {TOOLS} of {document} are not valid JSON: {error}") from error
    return [{"content": "", **message} for message in messages], {TOOLS: tools} if tools else {}


def _message_of(message: Any, name: str) -> dict[str, Any]:
    """Return a message with a role and, if it has one, its text."""
    found = _without_nulls(message) if isinstance(message, Mapping) else {}
    if "from" in found:  # ShareGPT
        found = {"role": ROLES.get(str(found["from"]), found["from"]), "content": found.get("value", "")}
    content = found.get("content", "")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        found["content"] = content = "".join(part.get("text", "") for part in content)
    if not isinstance(found.get("role"), str) or not isinstance(content, str):
        raise ValueError(f"{name} is {textwrap.shorten(repr(message), 100)}: expected a role and content, both text.")
    return found


def _without_nulls(value: Any) -> Any:
    """Return a value without keys that are None, which Arrow adds to what lacks them."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value
