import json

import pytest
import torch
from conftest import make_model, make_tokenizer

from optimum_neuronal import sample_text
from optimum_neuronal.data.documents import load_documents, read_prompts
from optimum_neuronal.data.sample_text import BATCH_SIZE, Writer


# A turn is the word of its role (user: w251, assistant: w252), its own, and w250.
TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'w251 ', 'assistant': 'w252 '}[message.role] + message.content + ' w250 ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'w252 ' }}{% endif %}"
)


@pytest.fixture
def model():
    return make_model("llama", vocab_size=256)


@pytest.fixture
def tokenizer():
    return make_tokenizer(chat_template=TEMPLATE, eos_token="w250", pad_token="w249")


def test_conversations(model, tokenizer):
    rows = [*sample_text(model, tokenizer, 40, max_new_tokens=12)]
    assert 30 < len(rows) <= 40 and len({str(row) for row in rows}) == len(rows), "batches differ"
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"] and "w250" not in message["content"].split() for message in row["messages"])
    texts = load_documents([row["messages"] for row in rows], tokenizer=tokenizer)
    assert max(len(tokenizer(text)["input_ids"]) for text in texts) <= 12 + 12 + 4, "with the template's words"


def test_what_is_drawn(model, tokenizer, monkeypatch):
    """The user's turn follows the template's beginning; each answer follows its own question."""
    seen = []
    generate = type(model).generate

    def noted(self, ids, attention_mask, **kwargs):
        seen.append([row[used.bool()].tolist() for row, used in zip(ids, attention_mask)])
        return generate(self, ids, attention_mask=attention_mask, **kwargs)

    monkeypatch.setattr(type(model), "generate", noted)
    rows = [*sample_text(model, tokenizer, 4, max_new_tokens=12)]
    assert seen[0] == [[251]] * 4
    asked = [tokenizer("w251 " + row["messages"][0]["content"] + " w250 w252")["input_ids"] for row in rows]
    assert all(prompt in seen[1] for prompt in asked)


def test_prompts_are_answered_in_turn(model, tokenizer, tmp_path):
    """Lines or conversations; a model without a chat template continues texts."""
    (tmp_path / "a.txt").write_text("w1 w2\n\nw3\n")
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps({"messages": ANSWERED[:-1]}) + "\n"))
    lines, chats = read_prompts(tmp_path / "a.txt"), read_prompts(tmp_path / "a.jsonl")
    assert lines == ["w1 w2", "w3"] and len(chats) == 2
    rows = [*sample_text(model, tokenizer, prompts=[*lines, *chats], max_new_tokens=8)]
    assert [row["messages"][0]["content"] for row in rows] == ["w1 w2", "w3", "w1", "w1"]
    assert all(row["messages"][1]["role"] == "assistant" and row["messages"][1]["content"] for row in rows)
    assert len([*sample_text(model, tokenizer, 5, prompts=lines, max_new_tokens=8)]) == 5
    tokenizer.chat_template = None
    rows = [*sample_text(model, tokenizer, prompts=lines, max_new_tokens=8)]
    assert [row["text"].startswith(line + " ") for row, line in zip(rows, lines)] == [True, True]
    with pytest.raises(ValueError, match=r"\(prompts\) holds conversations, but the tokenizer has no chat template"):
        next(sample_text(model, tokenizer, prompts=chats))


def test_the_seed_decides_and_nothing_else_changes(model, tokenizer):
    model.train().lm_head.eval()
    before = torch.get_rng_state()
    first, again, other = ([*sample_text(model, tokenizer, 40, max_new_tokens=8, seed=seed)] for seed in (0, 0, 1))
    assert first == again != other
    own = model.generation_config  # which a checkpoint has for chats
    own.repetition_penalty, own.num_return_sequences = 9.0, 2
    assert [*sample_text(model, tokenizer, 40, max_new_tokens=8)] == first and model.generation_config is own
    assert [*sample_text(model, tokenizer, BATCH_SIZE, max_new_tokens=8)] == first[: len(first) - 8], "whole batches"
    last = [*sample_text(model, tokenizer, 8, max_new_tokens=8, seed=BATCH_SIZE)]
    assert last != first[-8:], "no batch of another seed"
    assert torch.equal(torch.get_rng_state(), before) and model.training and not model.lm_head.training


def test_a_model_that_writes_nothing(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output.index_fill(-1, torch.tensor(250), 1e4))
    with pytest.raises(ValueError, match="LlamaForCausalLM wrote 3 empty samples"):
        [*sample_text(model, make_tokenizer(eos_token="w250"), 3, max_new_tokens=8)]


ANSWERED = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"temperature": 1e-300}, "temperature is 1e-300: expected a number from 0.01 to 100"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"max_new_tokens": 10**6}, "Prompts with their answers of up to 10001.. tokens do not fit"),
        ({"prompts": ["w1 " * 60], "max_new_tokens": 8}, "Prompts with their answers of up to 7. tokens do not fit"),
        ({"prompts": [[{"role": "user", "content": "w1"}] * 2, ANSWERED]}, "last turn of prompt 1 is the assistant's"),
        ({"prompts": [[{"role": "system", "content": "w1"}]]}, "does not accept prompt 0"),
    ],
)
def test_bad_arguments(given, message, model, tokenizer):
    with pytest.raises(ValueError, match=message):
        next(sample_text(model, tokenizer, **given))


def test_unusual_templates(model):
    """Without one, documents are written. With nothing around the user's turn, as DialoGPT's, the first token is that of a document."""
    rows = [*sample_text(model, make_tokenizer(eos_token="w250"), 5, max_new_tokens=12)]
    assert all(0 < len(row["text"].split()) <= 12 for row in rows)
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    rows = [*sample_text(model, make_tokenizer(chat_template=template, eos_token="w250"), 4, max_new_tokens=8)]
    assert rows and all(message["content"] for row in rows for message in row["messages"])
    template = "w5 QUESTION {% for m in messages %}{{ 'w6 ' + m.content }}{% endfor %}"  # with a system prompt
    assert Writer(model, make_tokenizer(chat_template=template), None, 8, {}).before == "w5 QUESTION w6 "
    for template, said in (
        ("w1", "doesn't show a user's turn once"),
        ("{{ raise_exception('No chats.') }}", "does not accept a user's turn. .*No chats"),
    ):
        with pytest.raises(ValueError, match=said):
            next(sample_text(model, make_tokenizer(chat_template=template), 1, max_new_tokens=8))
