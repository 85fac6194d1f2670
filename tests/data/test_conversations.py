import json

import datasets
import pytest
from conftest import make_tokenizer
from texts import draw
from transformers import LlamaConfig, ProcessorMixin

from optimum_neuronal.data.documents import load_documents
from optimum_neuronal.evaluation.perplexity import load_windows


# A message is the word of its role (user: w1, assistant: w2, tool: w3), then its own. Each conversation begins with w9.
ROLES = "{'user': 'w1', 'assistant': 'w2', 'tool': 'w3'}"
TEMPLATE = (
    "{{ 'w9 ' }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('No system messages.') }}{% endif %}"
    "{{ " + ROLES + "[message.role] + ' ' + message.content + ' ' }}{% endfor %}"
)
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


def test_nulls_are_empty_other_roles_are_kept_and_a_call_of_tools_may_have_no_text(chat_tokenizer):
    chat = [None, [], [*SHAREGPT[0], {"from": "tool", "value": "w40"}]]
    assert list(load_documents(chat, tokenizer=chat_tokenizer)) == ["", "", "w9 w1 w20 w21 w2 w22 w3 w40 "]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    chat = [CHAT[0][0], call, {"role": "tool", "content": "w40"}]
    assert list(load_documents([chat], "test", chat_tokenizer)) == ["w9 w1 w20 w21 w2  w3 w40 "]


IMAGE = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([{"role": "user"}], r"^Message 0 of document 1 of a list of 2 conversations is {'role': 'user'}: exp"),
        ([*CHAT[0], "w1"], r"^Message 2 of document 1 of .* is 'w1': expected a role and content, both text"),
        ([{"role": "user", "content": None}], "^Message 0 of document 1 .* expected a role and content"),
        (IMAGE, "^Message 0 of document 1 .* expected a role and content, both text"),
        ("w1", r"^Expected a list of messages, such as .*, but document 1 of a list of 2 conversations is 'w1'\.$"),
        ([{"role": "system", "content": "w1"}], "does not accept document 1 of .* .No system messages"),
    ],
)
def test_malformed_conversations(second, message, chat_tokenizer):
    with pytest.raises(ValueError, match=message):
        list(load_documents([CHAT[0], second], tokenizer=chat_tokenizer))


def test_other_malformed_data(chat_tokenizer):
    nothing = datasets.Dataset.from_dict({"prompt": ["w1"], "completion": [None]})
    for given, message in (
        (CHAT[0], "^Expected a list of messages, "),
        (nothing, "^Message 1 of document 0 of a dat"),
    ):
        with pytest.raises(ValueError, match=message):
            load_documents(given, tokenizer=chat_tokenizer)
    for given in (datasets.Dataset.from_dict({"messages": [["w1"]]}), [["w1"]]):
        with pytest.raises(TypeError, match="Document 0 of .* is a list: expected a string, or messages"):
            load_documents(given, tokenizer=chat_tokenizer)
