import pytest
import torch
from conftest import make_tokenizer
from tokenizers.processors import TemplateProcessing

from optimum_neuronal.training.packing import mix_texts, pack_text


def test_documents_are_joined_by_the_end_token_and_cut():
    """Each comes once, in an order that the seed decides."""
    documents = [" ".join(f"w{10 * number + word}" for word in range(7)) for number in range(4)]
    found = pack_text(documents, make_tokenizer(eos_token="w99"), 3, seq_length=8, seed=0, vocab_size=256)
    rows = torch.cat([found.held_out, found.windows])
    assert rows.shape == (4, 8) and len(found.held_out) == 1
    assert sorted(rows.tolist()) == [[10 * number + word for word in range(7)] + [99] for number in range(4)]
    orders = {
        tuple(
            pack_text(documents, make_tokenizer(eos_token="w99"), 3, seq_length=8, seed=seed, vocab_size=256)
            .windows[:, 0]
            .tolist()
        )
        for seed in range(6)
    }
    assert len(orders) > 1


def test_lines_stay_in_order():
    found = pack_text(
        [" ".join(f"w{word}" for word in range(20))], make_tokenizer(), 3, seq_length=5, seed=0, vocab_size=256
    )
    assert torch.cat([found.held_out, found.windows]).flatten().tolist() == list(range(20))


def test_no_more_than_needed():
    """16 sequences are held out of a long text."""
    text = [" ".join(f"w{word % 200}" for word in range(1000))]
    found = pack_text(text, make_tokenizer(), 7, seq_length=5, seed=0, vocab_size=256)
    assert (
        found.held_out.shape == (16, 5)
        and found.windows[0].tolist() == [80, 81, 82, 83, 84]
        and len(found.windows) == 7
    )


def test_16_are_held_out_of_many_documents_too():
    documents = [" ".join(f"w{word}" for word in range(number, number + 5)) for number in range(170)]
    how = {"seq_length": 5, "seed": 0, "vocab_size": 256}
    few, many = (pack_text(documents, make_tokenizer(), count, **how).held_out for count in (7, 150))
    assert few.shape == (16, 5) and torch.equal(few, many)


def test_a_tokenizer_that_ends_texts_itself():
    tokenizer = make_tokenizer(eos_token="w99")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A w99", special_tokens=[("w99", 99)])
    found = pack_text(["w1 w2 w3", "w1 w2 w3"], tokenizer, 1, seq_length=4, seed=0, vocab_size=256)
    assert torch.cat([found.held_out, found.windows]).tolist() == 2 * [[1, 2, 3, 99]]


def test_every_sequence_begins_with_bos():
    found = pack_text(
        [" ".join(f"w{word}" for word in range(20))],
        make_tokenizer(bos_token="w99"),
        3,
        seq_length=5,
        seed=0,
        vocab_size=256,
        bos=99,
    )
    assert torch.cat([found.held_out, found.windows]).tolist() == [[99, *range(4 * n, 4 * n + 4)] for n in range(4)]


def test_a_short_text_is_repeated_with_a_note(caplog):
    found = pack_text(
        [" ".join(f"w{word}" for word in range(20))], make_tokenizer(), 9, seq_length=5, seed=0, vocab_size=256
    )
    assert len(found.windows) == 3
    assert "holds 3 sequences of 5 tokens to train on, and 9 are needed: they are repeated" in caplog.text


def test_too_little_text_raises():
    with pytest.raises(ValueError, match="holds 9 tokens: expected at least two sequences of 5"):
        pack_text(
            [" ".join(f"w{word}" for word in range(9))], make_tokenizer(), 3, seq_length=5, seed=0, vocab_size=256
        )


def test_equal_parts_of_several_datasets():
    """The short text is repeated to half of the sequences."""
    long, short = (
        " ".join(f"w{word}" for word in range(start, start + count)) for start, count in ((0, 200), (200, 20))
    )
    how = {"seq_length": 5, "seed": 0, "vocab_size": 256}
    found = mix_texts([[long], [short]], make_tokenizer(), 12, **how)
    assert found.windows[:, 0].tolist() == [20, 205, 25, 210, 30, 215, 35, 205, 40, 210, 45, 215]
    assert found.held_out[:, 0].tolist() == [0, 5, 10, 15, 200]
    assert found.source == "a list of 1 strings and a list of 1 strings"
    alone = mix_texts([[long]], make_tokenizer(), 12, **how)
    assert torch.equal(alone.windows, pack_text([long], make_tokenizer(), 12, **how).windows)
