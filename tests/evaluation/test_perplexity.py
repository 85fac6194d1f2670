import math
import subprocess
import sys

import pytest
import torch
from conftest import make_tokenizer
from packed_models import make_zeroed
from texts import VOCAB
from transformers import GemmaConfig, LlamaConfig, LlamaForCausalLM

from optimum_neuronal import densify, save_pretrained, sparsify
from optimum_neuronal.data.documents import Documents
from optimum_neuronal.data.token_windows import with_bos
from optimum_neuronal.evaluation import perplexity as evaluation
from optimum_neuronal.evaluation.perplexity import evaluate_perplexity, load_windows, name_test_sets


CONFIG = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.5}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def test_windows_that_begin_with_bos(model):
    """It counts as one of a window's tokens, and is not predicted. Gemma models have it without being told."""
    tokenizer, ids = make_tokenizer(bos_token="w254"), random_ids(1, 70)[0]
    windows = with_bos(ids.unfold(0, 7, 7), 254)
    expected = by_hand(model, windows)
    found = evaluate_perplexity(model, tokenizer, [text(ids.tolist())], seq_length=8, add_bos=True)
    assert found == pytest.approx(expected, rel=1e-5)
    loaded = [load_windows(GemmaConfig(), tokenizer, [text(ids.tolist())], 8, add_bos=bos) for bos in (None, False)]
    assert torch.equal(loaded[0].ids, windows) and [found.begin_with_bos for found in loaded] == [True, False]
    passed = [load_windows(GemmaConfig(), given, windows) for given in (tokenizer, make_tokenizer())]
    assert [found.begin_with_bos for found in passed] == [True, False]
    assert load_windows(GemmaConfig(), None, loaded[0]) is loaded[0]


def random_ids(*shape, seed=0):
    return torch.randint(0, VOCAB - 1, shape, generator=torch.Generator().manual_seed(seed))


def by_hand(model, windows):
    """Every window has the same number of predicted tokens, so the mean of the windows' losses is the mean."""
    with torch.no_grad():
        losses = [model(input_ids=window[None], labels=window[None]).loss.double() for window in windows]
    return math.exp(torch.stack(losses).mean())


@pytest.fixture
def forwards(model):
    shapes = []
    model.register_forward_pre_hook(lambda _, __, kw: shapes.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    return shapes


class TestValue:
    def test_equals_the_models_own_loss(self, model, tokenizer, forwards):
        windows = random_ids(5, 16)
        for count in (5, 3):
            expected = pytest.approx(by_hand(model, windows[:count]), rel=1e-5)
            for batch_size in (1, 2, 5, 100):
                own = {"max_windows": count, "batch_size": batch_size}
                assert evaluate_perplexity(model, None, windows, **own) == expected
            assert evaluate_perplexity(model, tokenizer, [text(windows.flatten())], 16, max_windows=count) == expected
        forwards.clear()
        evaluate_perplexity(model, None, windows, max_windows=3, batch_size=2)
        assert forwards == [(2, 16), (1, 16)]

    def test_text_is_joined_and_cut_into_windows(self, model, tokenizer, forwards):
        ids = random_ids(45)
        documents = [text(ids[:7]), text(ids[7:30]), text(ids[30:])]
        perplexity = evaluate_perplexity(model, tokenizer, documents, 10)
        assert forwards == [(1, 10)] * 4  # the last five tokens fill no window
        assert perplexity == pytest.approx(by_hand(model, ids[:40].view(4, 10)), rel=1e-5)
        forwards.clear()
        evaluate_perplexity(model, tokenizer, [text(random_ids(70))])
        assert forwards == [(1, 32)] * 2, "the model's length"

    def test_the_datasets_own_number_of_windows(self, model, tokenizer, forwards, monkeypatch):
        documents = Documents([text(random_ids(100))], "c4", tokenizer, separator=" ", max_windows=4)
        roles = []
        monkeypatch.setattr(evaluation, "load_documents", lambda _name, role, *_: roles.append(role) or documents)
        evaluate_perplexity(model, tokenizer, "c4", 10)
        assert len(forwards) == 4 and roles == ["test"]
        evaluate_perplexity(model, tokenizer, "c4", 10, max_windows=6)
        assert len(forwards) == 10


def test_the_model_is_left_as_it_was(model):
    """In its modes, after an error too; it computes without gradients and cache."""
    model.train()
    model.model.layers[0].eval()
    before, seen, outputs = [module.training for module in model.modules()], [], []
    model.register_forward_pre_hook(lambda *_: seen.append(any(module.training for module in model.modules())))
    model.register_forward_hook(lambda module, args, output: outputs.append(output))
    evaluate_perplexity(model, None, random_ids(1, 8))
    assert not outputs[0].logits.requires_grad and outputs[0].past_key_values is None and model.config.use_cache
    for value in (torch.nan, torch.inf):
        model.lm_head.weight.data[3] = value
        with pytest.raises(ValueError, match="The loss is nan in windows 0 to 1"):
            evaluate_perplexity(model, None, random_ids(3, 8), batch_size=2)
    assert [module.training for module in model.modules()] == before and set(seen) == {False}


def test_mistakes(model, tokenizer):
    ids = random_ids(2, 8)
    for dataset, fields, message in (
        ([text(range(9))], {"seq_length": 10}, "holds 9 tokens, fewer than one window of 10"),
        ([[0, -1]], {}, f"vocabulary has {VOCAB} entries"),
        ([[0, VOCAB]], {}, f"vocabulary has {VOCAB} entries"),
        (["text"], {"seq_length": 33}, "of 33 tokens do not fit: this model allows 2 to 32"),
        (random_ids(2, 33), {}, "of 33 tokens do not fit: this model allows 2 to 32"),
        (random_ids(2, 1), {}, "of 1 tokens do not fit: this model allows 2 to 32"),
        (["text"], {"tokenizer": None}, "needs a tokenizer"),
        (ids, {"batch_size": 0}, "batch_size is 0: expected a whole number of at least"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_perplexity(model, **{"tokenizer": tokenizer, "dataset": dataset, **fields})
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        evaluate_perplexity(model.model, None, ids)


def test_a_model_may_be_named(model, tokenizer, tmp_path):
    """It comes with the tokenizer that lies there, if it has one."""
    model.save_pretrained(tmp_path)
    ids = random_ids(3, 16)
    assert evaluate_perplexity(str(tmp_path), dataset=ids) == evaluate_perplexity(model, None, ids)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        evaluate_perplexity(tmp_path, dataset=[text(range(40))])
    tokenizer.save_pretrained(tmp_path)
    expected = evaluate_perplexity(model, tokenizer, [text(range(40))], 16)
    assert evaluate_perplexity(tmp_path, None, [text(range(40))], 16) == expected


def test_packed_weights(ids, tmp_path):
    """The model is as it stands in memory, or named; densified, its perplexity differs by rounding."""
    packed = sparsify(make_zeroed())
    save_pretrained(packed, tmp_path, format="packed")
    found = evaluate_perplexity(packed, dataset=ids)
    assert evaluate_perplexity(tmp_path, dataset=ids) == pytest.approx(found, rel=1e-6)
    assert evaluate_perplexity(densify(packed), dataset=ids) == pytest.approx(found, rel=1e-5)
    with pytest.raises(ValueError, match="vocabulary"):
        evaluate_perplexity(packed, dataset=ids + VOCAB)


def test_few_modules_are_imported():
    """In a process of its own, which has imported nothing else."""
    code = "import sys, optimum_neuronal; optimum_neuronal.evaluate_perplexity; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sum(name.partition(".")[0] == "optimum_neuronal" for name in result.stdout.split()) <= 40


def test_every_test_set_keeps_a_name_of_its_own(tmp_path):
    files = [tmp_path / name for name in ("a/test.txt", "b/test.txt", "c/test.jsonl", "test.txt (2)")]
    ids = torch.zeros(1, 2, dtype=torch.int64)
    entries = [str(files[0]), files[1], f"{files[2]}:code", str(files[3]), "wikitext2", ids, ["text"], "wikitext2"]
    named = name_test_sets(entry for entry in entries)
    assert list(named) == [
        "test.txt", "test.txt (2)", "test.jsonl:code", "test.txt (2) (4)", "wikitext2", "test 6", "test 7", "wikitext2 (8)"
    ]  # fmt: skip
    assert all(found is entry for found, entry in zip(named.values(), entries, strict=True))
    assert name_test_sets({"mine": ids}) == {"mine": ids} and name_test_sets(()) == {}
    for one in ("wikitext2", 5, None):
        with pytest.raises(TypeError, match=r"expected a list of test sets, such as \['wikitext2'\]"):
            name_test_sets(one)
