import pytest
import torch
from conftest import make_tokenizer
from tokenizers.processors import TemplateProcessing

from optimum_neuronal.training.finetune_setup import mix_texts, pack_text


def pack(texts, tokenizer, count, seq_length=5, seed=0, **how):
    return pack_text(texts, tokenizer, count, seq_length=seq_length, seed=seed, vocab_size=256, **how)


def words(count, start=0):
    return " ".join(f"w{start + word % 200}" for word in range(count))


def rows_of(found):
    return torch.cat([found.held_out, found.ids]).tolist()


def test_documents_are_joined_by_the_end_token_and_cut():
    """Each comes once, in an order that the seed decides."""
    documents, tokenizer = [words(7, 10 * number) for number in range(4)], make_tokenizer(eos_token="w99")
    found = pack(documents, tokenizer, 3, 8)
    assert found.ids.shape == (3, 8) and found.held_out.shape == (1, 8) and found.source == "a list of 4 strings"
    assert sorted(rows_of(found)) == [[*range(10 * number, 10 * number + 7), 99] for number in range(4)]
    assert len({tuple(pack(documents, tokenizer, 3, 8, seed).ids[:, 0].tolist()) for seed in range(6)}) > 1


def test_lines_stay_in_order_and_begin_with_bos():
    assert rows_of(pack([words(20)], make_tokenizer(), 3)) == [[*range(n, n + 5)] for n in range(0, 20, 5)]
    found = pack([words(20)], make_tokenizer(bos_token="w99"), 3, bos=99)
    assert rows_of(found) == [[99, *range(n, n + 4)] for n in range(0, 16, 4)] and found.add_bos


def test_no_more_than_needed():
    """16 sequences are held out of a long text, and of many documents whatever the count."""
    found = pack([words(1000)], make_tokenizer(), 7)
    assert found.held_out.shape == (16, 5) and found.ids[0].tolist() == [*range(80, 85)] and len(found.ids) == 7
    few, many = (pack([words(5, n) for n in range(50)] * 4, make_tokenizer(), count).held_out for count in (7, 150))
    assert few.shape == (16, 5) and torch.equal(few, many)


def test_a_tokenizer_that_ends_texts_itself():
    tokenizer = make_tokenizer(eos_token="w99")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A w99", special_tokens=[("w99", 99)])
    assert rows_of(pack(["w1 w2 w3", "", "w1 w2 w3"], tokenizer, 1, 4)) == 2 * [[1, 2, 3, 99]]


def test_short_texts(caplog):
    assert len(pack([words(20)], make_tokenizer(), 9).ids) == 3
    assert "holds 3 sequences of 5 tokens to train on, and 9 are needed: they are repeated" in caplog.text
    with pytest.raises(ValueError, match="holds 9 tokens: expected at least two sequences of 5"):
        pack([words(9)], make_tokenizer(), 3)


def test_parts_of_several_datasets():
    """The short text is repeated to its share of the sequences, half by default."""
    how = {"seq_length": 5, "seed": 0, "vocab_size": 256}
    found = mix_texts([[words(200)], [words(20, 200)]], make_tokenizer(), 12, **how)
    assert found.ids[:, 0].tolist() == [20, 205, 25, 210, 30, 215, 35, 205, 40, 210, 45, 215]
    assert found.held_out[:, 0].tolist() == [0, 200, 5, 10, 15]
    assert found.source == "a list of 1 strings (50%) and a list of 1 strings (50%)"
    alone = mix_texts([[words(200)]], make_tokenizer(), 12, **how)
    assert torch.equal(alone.ids, pack([words(200)], make_tokenizer(), 12).ids)
