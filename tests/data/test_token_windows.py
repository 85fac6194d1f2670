from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from conftest import make_tokenizer
from texts import VOCAB
from transformers import Gemma3Config, GemmaConfig, GPT2Config, LlamaConfig

from optimum_neuronal.data.token_windows import (
    TokenWindows,
    as_token_ids,
    mix,
    padding_ids,
    resolve_bos,
    resolve_seq_length,
    take_sequences,
)


def test_windows_of_several_datasets_take_turns_by_their_shares():
    """Equal ones by default; the first datasets have one more if it does not come out even. Short ones are repeated."""
    long, short = (torch.arange(start, start + 2 * count).view(count, 2) for start, count in ((0, 5), (100, 1)))
    parts = {
        "a": TokenWindows(long, "a", "documents", 0, held_out=long[3:]),
        "b": TokenWindows(short, "b", "stream", 0, held_out=short),
        "c": TokenWindows(long + 50, "c", "documents", 0),
    }
    asked = []
    found = mix([*"abc"], 5, 4, lambda name, count: asked.append((name, count)) or parts[name])
    assert found.ids[:, 0].tolist() == [0, 100, 50, 2, 100] and asked == [("a", 2), ("b", 2), ("c", 1)]
    assert torch.equal(found.held_out, torch.cat([long[3:4], short, long[4:]]))
    assert found.source == "a (33%) and b (33%) and c (33%)"
    assert (found.drawn_from, found.seed) == ("documents and stream", 0)
    draw = lambda name, count: parts[name]  # noqa: E731
    assert torch.equal(mix([*"abc"], 3, 4, draw).ids, found.ids[:3])
    alone = mix(["a"], 5, 4, draw)
    assert torch.equal(alone.ids, long) and (alone.source, alone.dataset_tokens) == ("a", {"a": 10})
    found = mix(["a:0.8", "b:.2"], 10, 2, draw)
    assert found.ids[:, 0].tolist() == [0, 2, 100, 4, 6, 8, 0, 100, 2, 4]
    assert found.to_dict()["dataset_tokens"] == {"a (80%)": 16, "b (20%)": 4} and torch.equal(found.held_out, long[3:])
    assert mix(["a", "a"], 5, 2, draw).dataset_tokens == {"a (50%)": 10}, "two files of one name"
    for wrong in (["a:0.8", "b:0.3"], ["a:0.8", "b"], ["a:0.5"], ["a:0.5", ["a text"]]):
        with pytest.raises(ValueError, match="do not sum to 1: expected one after each name"):
            mix(wrong, 10, 2, draw)


def test_gemma_models_get_bos_unless_told_otherwise():
    tokenizer, without = make_tokenizer(bos_token="w9"), make_tokenizer()
    llama, gemma, gemma3 = LlamaConfig(), GemmaConfig(), Gemma3Config()
    for config, given, add_bos, expected in (
        (llama, tokenizer, None, None),
        (llama, tokenizer, True, 9),
        (gemma, tokenizer, None, 9),
        (gemma, tokenizer, False, None),
        (gemma3, tokenizer, None, 9),
        (gemma, without, None, None),
        (gemma, None, None, gemma.bos_token_id),
    ):
        assert resolve_bos(config, given, add_bos) == expected
    with pytest.raises(ValueError, match="add_bos is True, but the tokenizer has no BOS token"):
        resolve_bos(llama, without, True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, 8, dtype=torch.int64), "num_samples=4, but there are 3 sequences"),
        (torch.zeros(4, 9, dtype=torch.int64), "seq_length=8, but the sequences of token ids have 9 tokens"),
        (torch.zeros(4, 8), "integers"),
        (torch.zeros(4, 8, dtype=torch.bool), "integers"),
        (torch.zeros(8, dtype=torch.int64), "shape"),
        (np.zeros((0, 8), int), "shape"),
        ([[1, 2], [3]], "2 rows, not of equal length"),
        ([[0] * 7 + [-1]] * 4, f"vocabulary has {VOCAB} entries"),
        ([[0] * 7 + [VOCAB]] * 4, f"vocabulary has {VOCAB} entries"),
    ],
)
def test_unsuitable_token_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        take_sequences(as_token_ids(ids, 8), 4, VOCAB)


def test_token_ids():
    ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    readonly = np.array(ids)
    readonly.setflags(write=False)
    dataset = datasets.Dataset.from_dict({"input_ids": ids})
    columns = (dataset["input_ids"], dataset.with_format("torch")["input_ids"])
    rows = [torch.tensor(row) for row in ids]
    for given in (torch.tensor(ids), np.array(ids, np.uint16), readonly, ids, rows, *columns):
        result = take_sequences(as_token_ids(given), 2, VOCAB)
        assert result.ids.tolist() == ids[:2] and result.ids.dtype == torch.int64
        assert result.drawn_from == "token ids" and result.seed is None
    assert as_token_ids(np.array(["a text"])) is None


def test_padded_token_ids_raise():
    """Eight tokens of padding, or of the end of a text, at an end of a row, or an attention mask. Fewer may be text."""
    row, config = [5, 6, 7, 8] * 3, LlamaConfig(pad_token_id=0, eos_token_id=[2, 3])
    own = SimpleNamespace(pad_token_id=9, eos_token_id=None)
    assert padding_ids(config) == {0, 2, 3} and padding_ids(config, own) == {0, 2, 3, 9}
    padding, said = padding_ids(config, own), "^1 of 2 rows of token ids are padded: pass rows without"
    for padded in ([5, 6, 7, 8] + [0] * 8, [3] * 8 + row[:4], [9] * 12):
        with pytest.raises(ValueError, match=said):
            as_token_ids([row, padded], padding=padding)
        assert as_token_ids([row, padded]).tolist() == [row, padded]
    for good in (row, row[:5] + [2] * 7, [0] * 7 + row[:5], [5, *[0] * 10, 5]):
        assert as_token_ids([good], padding=padding).tolist() == [good]
    encoding = {"input_ids": torch.tensor([row, row]), "attention_mask": torch.ones(2, 12)}
    assert as_token_ids(encoding, padding=padding).tolist() == [row, row]
    encoding["attention_mask"][1, -1] = 0
    with pytest.raises(ValueError, match=said):
        as_token_ids(encoding)


def test_resolve_seq_length():
    for config, given, length in (
        (LlamaConfig(max_position_embeddings=4096), None, 2048),
        (LlamaConfig(max_position_embeddings=512), None, 512),
        (GPT2Config(n_positions=1024), None, 1024),
        (LlamaConfig(max_position_embeddings=4096), 4096, 4096),
    ):
        assert resolve_seq_length(config, given) == length
    for bad in (0, 513):
        with pytest.raises(ValueError, match=f"of {bad} tokens do not fit: this model allows 2 to 512 tokens"):
            resolve_seq_length(LlamaConfig(max_position_embeddings=512), bad)
