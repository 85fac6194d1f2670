import json

import datasets
import pytest
from conftest import make_tokenizer
from texts import draw
from transformers import LlamaConfig, ProcessorMixin

from optimum_neuronal.data.conversations import render
from optimum_neuronal.data.documents import load_documents
from optimum_neuronal.evaluation.perplexity import load_windows


# A message is the word of its role (user: w1, assistant: w2, tool: w3), then its own. Each conversation begins with w9, and
# lists of tools come after it.
ROLES = "{'user': 'w1', 'assistant': 'w2', 'tool': 'w3'}"
TEMPLATE = (
    "{{ 'w9 ' }}{% if tools %}{{ tools | tojson + ' ' }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('No system messages.') }}{% endif %}"
    "{{ " + ROLES + "[message.role] + ' ' + message.content + ' ' }}"
    "{% for call in message.tool_calls %}{{ call.function.name + call.function.arguments | tojson + ' ' }}{% endfor %}"
    "{% endfor %}"
)
PLAIN = TEMPLATE.replace("tool_calls", "nothing").replace("if tools", "if nothing")
CHAT = [
    [{"role": "user", "content": "w20 w21"}, {"role": "assistant", "content": "w22"}],
    [{"role": "user", "content": "w30"}, {"role": "assistant", "content": "w31 w32"}],
]
SHAREGPT = [
    [{"from": "human", "value": "w20 w21"}, {"from": "gpt", "value": "w22"}],
    [{"from": "human", "value": "w30"}, {"from": "gpt", "value": "w31 w32"}],
]
PROMPTS = {"prompt": ["w20 w21", "w30"], "completion": ["w22", "w31 w32"]}
MESSAGES = {"prompt": [chat[:1] for chat in CHAT], "completion": [chat[1:] for chat in CHAT]}
TEXTS = ["w9 w1 w20 w21 w2 w22 ", "w9 w1 w30 w2 w31 w32 "]
IDS = [9, 1, 20, 21, 2, 22, 9, 1, 30, 2, 31, 32]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def chat_tokenizer():
    return make_tokenizer(bos_token="w9", chat_template=TEMPLATE)


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": CHAT, "id": ["a", "b"]},
        {"conversations": SHAREGPT, "id": ["a", "b"]},
        {"conversations": CHAT},
        PROMPTS,
        MESSAGES,
        {"other": [1, 2], "conversations": [[], []], "messages": CHAT},
    ],
)
def test_columns(columns, chat_tokenizer, tmp_path):
    dataset = datasets.Dataset.from_dict(columns)
    dataset.to_json(tmp_path / "chat.jsonl")
    dataset.to_parquet(tmp_path / "chat.parquet")
    (tmp_path / "chat.json").write_text(json.dumps(dataset.to_list()))
    files = [tmp_path / name for name in ("chat.jsonl", "chat.parquet", "chat.json")]
    for given in (dataset, dataset.to_iterable_dataset(), *files):
        documents = load_documents(given, "test", chat_tokenizer)
        assert list(documents) == TEXTS
        assert documents.tokenize_joined(None) == IDS
        documents = load_documents(given, "train", chat_tokenizer, streaming=True)
        assert sorted(documents.shuffled(0)) == TEXTS


def test_named_columns_and_lists(chat_tokenizer, tmp_path, monkeypatch):
    dataset = datasets.Dataset.from_dict({"text": ["a", "b"], "chat": CHAT, "prompt": CHAT})
    dataset.to_json(tmp_path / "chat.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_kwargs: dataset)
    for given in (f"{tmp_path / 'chat.jsonl'}:chat", "me/data:train:chat", dataset["chat"], CHAT, SHAREGPT):
        assert list(load_documents(given, tokenizer=chat_tokenizer)) == TEXTS
    assert list(load_documents("me/data", tokenizer=chat_tokenizer)) == ["a", "b"], "text comes first"
    assert load_documents(CHAT, tokenizer=chat_tokenizer).source == "a list of 2 conversations"


def test_windows_have_the_templates_own_bos_alone(chat_tokenizer):
    """Or begin with the one that is asked for, which no other place has."""
    found = draw(CHAT, chat_tokenizer, num_samples=2, seq_length=6)
    assert sorted(found.ids.tolist()) == [IDS[:6], IDS[6:]] and found.drawn_from == "documents"
    stream = draw(CHAT, chat_tokenizer, num_samples=1, seq_length=12)
    assert stream.ids.tolist() == [IDS] and stream.drawn_from == "stream"
    for sampling, count in (("distinct", 2), ("authors", 1)):
        with_bos = draw(CHAT, chat_tokenizer, num_samples=count, seq_length=5, bos=9, sampling=sampling).ids
        assert (with_bos[:, 0] == 9).all() and (with_bos[:, 1:] != 9).all()
    joined = draw(CHAT, chat_tokenizer, num_samples=1, seq_length=11, bos=9).ids
    rest = [token for token in IDS if token != 9]
    assert joined.tolist() == [[9, *rest]]
    config = LlamaConfig(vocab_size=256, max_position_embeddings=64)
    assert load_windows(config, chat_tokenizer, CHAT, 6).ids.tolist() == [IDS[:6], IDS[6:]]
    with_bos = load_windows(config, chat_tokenizer, CHAT, 6, add_bos=True)
    assert with_bos.ids.tolist() == [[9, *rest[:5]], [9, *rest[5:]]]


def test_processors(chat_tokenizer):
    """Their own templates read parts. Without one, the tokenizer's is used."""
    processor = ProcessorMixin()
    processor.tokenizer, processor.chat_template = chat_tokenizer, None
    assert list(load_documents(CHAT, tokenizer=processor)) == TEXTS
    processor.chat_template = (
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}/{% endfor %}{% endfor %}"
    )
    assert list(load_documents(CHAT, tokenizer=processor)) == ["w20 w21/w22/", "w30/w31 w32/"]
    parts = [[{"role": "user", "content": [{"type": "text", "text": "w4 "}, {"type": "text", "text": "w5"}]}]]
    assert list(load_documents(parts, tokenizer=processor)) == ["w4 w5/"]
    assert list(load_documents(parts, tokenizer=chat_tokenizer)) == ["w9 w1 w4 w5 "]


def test_nulls_are_empty_and_other_roles_are_kept(chat_tokenizer):
    chat = [None, [], [*SHAREGPT[0], {"from": "tool", "value": "w40"}]]
    assert list(load_documents(chat, tokenizer=chat_tokenizer)) == ["", "", "w9 w1 w20 w21 w2 w22 w3 w40 "]


CALLS = [
    CHAT[0][0],
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "unit": "m"}}}]},
    {"role": "tool", "content": "w40"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g", "arguments": {}}}]},
    {"role": "user", "content": None},
]
TOOL_ROWS = [{"messages": CALLS, "tools": [{"name": "f"}, {"name": "g", "strict": True}]}, {"messages": CHAT[1]}]
CALLED = 'w9 [{"name": "f"}, {"name": "g", "strict": true}] w1 w20 w21 w2  f{"x": 1, "unit": "m"} w3 w40 w2  g{} w1  '


def test_a_file_a_dataset_and_a_list_of_tool_calls_give_the_same_text(chat_tokenizer, tmp_path, caplog):
    """And turns and lists of tools that the template leaves out are counted."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TOOL_ROWS))
    (tmp_path / "b.jsonl").write_text(json.dumps({**TOOL_ROWS[0], "tools": json.dumps(TOOL_ROWS[0]["tools"])}))
    dataset = datasets.Dataset.from_list(TOOL_ROWS)
    assert dataset[0]["messages"][3]["tool_calls"][0]["function"]["arguments"] == {"x": None, "unit": None}
    for given in (TOOL_ROWS, dataset, dataset.to_iterable_dataset(), tmp_path / "a.jsonl", tmp_path / "b.jsonl"):
        documents = load_documents(given, "test", chat_tokenizer)
        assert list(documents)[:1] == [CALLED] and sum(documents.lost.values()) == 1, "a turn without text"
    chat_tokenizer.chat_template = PLAIN
    assert draw(TOOL_ROWS, chat_tokenizer, num_samples=1, seq_length=4)
    assert "The chat template leaves out 4 turns or lists of tools of a list of 2 conversations" in caplog.text


def test_no_tools_may_be_empty_text(chat_tokenizer):
    assert render({"messages": CHAT[0], "tools": " "}, chat_tokenizer, "it") == render(CHAT[0], chat_tokenizer, "it")


def test_templates_that_need_tools_or_have_names(chat_tokenizer):
    chat_tokenizer.chat_template = "{% for tool in tools %}{{ tool.name }}{% endfor %}"
    assert list(load_documents(TOOL_ROWS[:1], "test", chat_tokenizer)) == ["fg"]
    with pytest.raises(ValueError, match="does not accept document 0 of .* add `tools` if the template needs them"):
        load_documents(CHAT, tokenizer=chat_tokenizer)
    chat_tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "w8"}
    assert list(load_documents(TOOL_ROWS, "test", chat_tokenizer)) == ["w8", TEXTS[1]]
    chat_tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": "w8"}
    with pytest.raises(ValueError, match="templates are named rag, tool_use: save the one to use as chat_template"):
        load_documents(CHAT, tokenizer=chat_tokenizer)


IMAGE = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([{"role": "user"}], "^Expected a list of messages, .* no message of document 1 of a list of .* has content"),
        ([*CHAT[0], "w1"], r"^Message 2 of document 1 of .* is 'w1': expected a role and content, both text"),
        (IMAGE, "^Message 0 of document 1 .* expected a role and content, both text"),
        ("w1", r"^Expected a list of messages, such as .*, but document 1 of a list of 2 conversations is 'w1'\.$"),
        ([{"role": "system", "content": "w1"}], "does not accept document 1 of .* .No system messages"),
        (
            {"messages": CHAT[0], "tools": "[f]"},
            "The tools of document 1 of a list of .* are not valid JSON: Expecting",
        ),
    ],
)
def test_malformed_conversations(second, message, chat_tokenizer):
    with pytest.raises(ValueError, match=message):
        list(load_documents([CHAT[0], second], tokenizer=chat_tokenizer))


def test_other_malformed_data(chat_tokenizer):
    nothing = datasets.Dataset.from_dict({"prompt": [None], "completion": [None]})
    for given, message in (
        (CHAT[0], "^Expected a list of messages, "),
        (nothing, "no message of document 0 of a datasets.Dataset has content"),
    ):
        with pytest.raises(ValueError, match=message):
            load_documents(given, tokenizer=chat_tokenizer)
    for given in (datasets.Dataset.from_dict({"messages": [["w1"]]}), [["w1"]]):
        with pytest.raises(TypeError, match="Document 0 of .* is a list: expected a string, or messages"):
            load_documents(given, tokenizer=chat_tokenizer)
