import json

import datasets
import pytest
import torch
from conftest import make_tokenizer

from optimum_neuronal.data.calibration import as_token_ids, draw_windows
from optimum_neuronal.data.documents import load_documents
from optimum_neuronal.evaluation.perplexity import load_windows


# Begins with a token of its own, as chat templates do, and so that a tokenizer must not add it again.
TEMPLATE = "w100 {% for m in messages %}{{ m.role }} {{ m.content }} w101 {% endfor %}"
CHATS = [
    [{"role": "w1", "content": "w2 w3"}, {"role": "w4", "content": "w5"}],
    [{"role": "w1", "content": "w6"}],
]
TEXTS = ["w100 w1 w2 w3 w101 w4 w5 w101 ", "w100 w1 w6 w101 "]


@pytest.fixture
def chatting():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_wherever_they_come_from(chatting, tmp_path):
    chats = datasets.Dataset.from_dict({"messages": CHATS, "prompt": ["a", "b"], "id": ["c", "d"]})
    chats.to_parquet(tmp_path / "chats.parquet")
    records = [{"messages": chat, "id": "x"} for chat in CHATS]
    sources = [CHATS, chats, tmp_path / "chats.parquet", write(tmp_path / "chats.jsonl", records)]
    for source in sources:
        documents = load_documents(source, tokenizer=chatting)
        assert list(documents) == TEXTS and documents.templated
    named = write(tmp_path / "named.jsonl", [{"text": "no", "chat": chat} for chat in CHATS])
    assert list(load_documents(f"{named}:chat", tokenizer=chatting)) == TEXTS
    assert list(load_documents(named)) == ["no", "no"]


def test_special_tokens_are_the_templates(chatting, tmp_path):
    path = write(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}] * 3)
    chatting.add_bos_token = True
    seen = []

    def tokenize(text, **options):
        seen.append(options)
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    tokenize.chat_template, tokenize.apply_chat_template = TEMPLATE, chatting.apply_chat_template
    drawn = draw_windows(path, tokenize, num_samples=2, seq_length=8, seed=0, vocab_size=256)
    assert drawn.ids.tolist() == [[100, 1, 2, 3, 101, 4, 5, 101]] * 2
    assert all(options["add_special_tokens"] is False for options in seen)


def test_conversations_are_no_token_ids():
    assert as_token_ids(CHATS) is None
    assert torch.equal(as_token_ids([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 4]]))


def test_perplexity_of_conversations(chatting, llama):
    windows = load_windows(llama.config, chatting, CHATS, 4, None)
    assert windows.tolist() == [[100, 1, 2, 3], [101, 4, 5, 101], [100, 1, 6, 101]]


def test_without_a_chat_template():
    for given in (None, make_tokenizer()):
        message = "a list of 2 conversations.* holds conversations, .*set tokenizer.chat_template"
        with pytest.raises(ValueError, match=message):
            load_documents(CHATS, tokenizer=given)


def test_entries_that_do_not_fit(chatting):
    for odd in ("text", [{"role": "user"}], [], None):
        with pytest.raises(TypeError, match="Document 2 of .* is no conversation, but the first one is"):
            load_documents([*CHATS, odd], tokenizer=chatting)
    chatting.chat_template = "{{ raise_exception('roles take turns') }}"
    with pytest.raises(ValueError, match="Document 0 of .* chat template: roles take turns"):
        load_documents(CHATS, tokenizer=chatting)
