import random

import pytest
import torch
from conftest import make_tokenizer
from texts import MIXED, document, draw

from optimum_neuronal.data.calibration import draw_as_authors
from optimum_neuronal.data.documents import Documents


class TestDistinct:
    def test_windows_lie_inside_distinct_long_documents(self, tokenizer):
        result = draw(MIXED, tokenizer, num_samples=10)
        assert result.ids.shape == (10, 8) and result.ids.dtype == torch.int64 and result.drawn_from == "documents"
        assert (result.ids.diff(dim=1) == 1).all(), "a window is consecutive words of one document"
        assert ((result.ids[:, 0] % 20) <= 12).all()
        assert sorted((result.ids[:, 0] // 20).tolist()) == list(range(10)), "every document once"
        result = draw([document(0, 8), document(50, 7), document(100, 8)], tokenizer, num_samples=2)
        assert sorted(result.ids[:, 0].tolist()) == [0, 100], "a document of exactly the length counts"
        documents = [document(10 * i, 10) for i in range(20)]
        assert set((draw(documents, tokenizer, num_samples=20).ids[:, 0] % 10).tolist()) == {0, 1, 2}
        assert len(set(draw([document(0, 200)], tokenizer, num_samples=20).ids[:, 0].tolist())) > 10

    def test_the_seed_alone_decides_and_nothing_is_said(self, tokenizer, caplog, capfd):
        random.seed(3)
        expected = random.random()
        random.seed(3)
        assert torch.equal(draw(MIXED, tokenizer).ids, draw(MIXED, tokenizer).ids)
        assert not torch.equal(draw(MIXED, tokenizer).ids, draw(MIXED, tokenizer, seed=1).ids)
        assert random.random() == expected, "the global generator is left alone"
        assert "longer than" not in caplog.text + capfd.readouterr().err

    def test_fewer_samples_are_a_prefix(self, tokenizer):
        for dataset in (MIXED, [document(0, 300)]):  # documents, and a stream
            whole = draw(dataset, tokenizer, num_samples=20).ids
            for num_samples in (1, 8, 12):
                assert torch.equal(draw(dataset, tokenizer, num_samples=num_samples).ids, whole[:num_samples])

    def test_what_is_drawn_from(self, tokenizer):
        short = [document(3 * i, 3) for i in range(20)]
        for dataset, num_samples, route, consecutive in (
            (MIXED, 25, "documents", True),  # ten long documents of 20 tokens: exactly 25 * 8
            (MIXED, 26, "stream", False),
            (short, 7, "stream", True),
        ):
            result = draw(dataset, tokenizer, num_samples=num_samples)
            assert result.drawn_from == route and result.ids.shape == (num_samples, 8)
            assert not consecutive or (result.ids.diff(dim=1) == 1).all()

    def test_held_out_windows_overlap_with_no_drawn_one(self, tokenizer):
        for dataset in (MIXED, [document(0, 300)]):
            found = draw(dataset, tokenizer, num_samples=4)
            used, held_out = (set(ids.flatten().tolist()) for ids in (found.ids, found.held_out))
            assert held_out and not held_out & used
        assert draw([document(0, 16)], tokenizer, num_samples=2).held_out is None, "all windows overlap"


def authors_loop(texts, tokenizer, num_samples, seed, seqlen):
    """The loop of NeuronAL's authors (lib/data.py) for C4, or for one text in place of documents."""
    random.seed(seed)
    drawn = []
    for _ in range(num_samples):
        while True:
            ids = texts if isinstance(texts, str) else texts[random.randint(0, len(texts) - 1)]
            ids = tokenizer(ids, return_tensors="pt").input_ids
            if ids.shape[1] > seqlen:
                break
        i = random.randint(0, ids.shape[1] - seqlen - 1)
        drawn.append(ids[:, i : i + seqlen])
    return torch.cat(drawn)


class TestTheAuthorsDraw:
    @pytest.mark.parametrize("seed", [0, 16, 46])
    def test_it_is_their_loop(self, tokenizer, seed):
        """Documents with replacement, lines joined by a space; the first sequences do not depend on the number."""
        random.seed(5)
        state = random.getstate()
        for dataset, texts in ((MIXED, MIXED), ([document(0, 300)], document(0, 300))):
            found = draw(dataset, tokenizer, num_samples=12, seed=seed, sampling="authors")
            assert found.sampling == found.to_dict()["sampling"] == "authors"
            assert random.getstate() == state, "the global generator is left alone"
            assert torch.equal(found.ids, authors_loop(texts, tokenizer, 12, seed, 8))
            few = draw(dataset, tokenizer, num_samples=5, seed=seed, sampling="authors").ids
            assert torch.equal(few, found.ids[:5])
            random.setstate(state)
        lines = [document(7 * i, 5) for i in range(20)]
        found = draw_as_authors(Documents(lines, "lines", tokenizer, joined=True), 6, 8, seed)
        assert found == authors_loop(" ".join(lines), tokenizer, 6, seed, 8).tolist()

    def test_a_document_of_just_the_length_is_too_short(self, tokenizer):
        texts = [document(0, 8), document(50, 9)]
        assert set(draw(texts, tokenizer, num_samples=6, sampling="authors").ids[:, 0].tolist()) == {50}
        for too_short in (texts[:1], texts[:1] * 2):
            with pytest.raises(ValueError, match="No text .* has more than 8 tokens.*set sampling='distinct'"):
                draw(too_short, tokenizer, sampling="authors")


@pytest.mark.parametrize("sampling", ["distinct", "authors"])
def test_every_window_begins_with_bos_once(sampling):
    """With the id 255 as BOS, which occurs in no text."""
    tokenizer = make_tokenizer(bos_token="<unk>")
    for dataset in (MIXED, [document(0, 300)]):
        found = draw(dataset, tokenizer, num_samples=12, bos=255, sampling=sampling)
        assert found.ids.shape == (12, 8) and found.to_dict()["add_bos"] is True and found.begin_with_bos
        for ids in (found.ids, found.held_out):
            assert (ids[:, 0] == 255).all() and (ids[:, 1:] != 255).all()
        # The other tokens are those of shorter windows of the same text without it.
        plain = draw(dataset, make_tokenizer(), num_samples=12, seq_length=7, sampling=sampling)
        assert torch.equal(found.ids[:, 1:], plain.ids) and plain.to_dict()["add_bos"] is False


def test_unsuitable_text(tokenizer):
    with pytest.raises(ValueError, match=r"holds 20 tokens, but 4 sequences of 8 need 32: give more text"):
        draw([document(0, 20)], tokenizer)
    with pytest.raises(TypeError, match="Document 1 of a list of 3 strings is a int"):
        draw(["text", 3, "text"], tokenizer)
    with pytest.raises(ValueError, match="range from 0 to 99, but the model's vocabulary has 50"):
        draw([document(0, 100)], tokenizer, num_samples=1, seq_length=100, vocab_size=50)
