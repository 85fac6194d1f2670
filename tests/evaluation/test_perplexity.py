import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast

from optimum_neuronal.data.calibration import Documents
from optimum_neuronal.evaluation import perplexity as evaluation
from optimum_neuronal.evaluation.perplexity import evaluate_perplexity


VOCAB = 256
CONFIG = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.5}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()


@pytest.fixture
def tokenizer():
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<unk>": VOCAB - 1}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", model_max_length=4)


def text(ids):
    return " ".join(f"w{i}" for i in ids)


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
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


class TestValue:
    def test_constant_logits_give_the_vocabulary_size(self, model):
        torch.nn.init.zeros_(model.lm_head.weight)
        perplexity = evaluate_perplexity(model, None, random_ids(3, 16))
        assert type(perplexity) is float and perplexity == pytest.approx(VOCAB, rel=1e-6)

    @pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
    def test_equals_the_models_own_loss(self, model, batch_size):
        windows = random_ids(5, 16)
        perplexity = evaluate_perplexity(model, None, windows, batch_size=batch_size)
        assert perplexity == pytest.approx(by_hand(model, windows), rel=1e-5)

    def test_text_is_joined_and_cut_into_windows(self, model, tokenizer, forwards):
        ids = random_ids(45)
        documents = [text(ids[:7]), text(ids[7:30]), text(ids[30:])]
        perplexity = evaluate_perplexity(model, tokenizer, documents, 10)
        assert forwards == [(1, 10)] * 4  # the last five tokens fill no window
        assert perplexity == pytest.approx(by_hand(model, ids[:40].view(4, 10)), rel=1e-5)

    def test_default_length_is_the_models(self, model, tokenizer, forwards):
        evaluate_perplexity(model, tokenizer, [text(random_ids(70))])
        assert forwards == [(1, 32)] * 2

    def test_max_windows(self, model, tokenizer, forwards):
        windows = random_ids(5, 16)
        expected = pytest.approx(by_hand(model, windows[:3]), rel=1e-5)
        forwards.clear()
        assert evaluate_perplexity(model, None, windows, max_windows=3, batch_size=2) == expected
        assert forwards == [(2, 16), (1, 16)]
        assert evaluate_perplexity(model, tokenizer, [text(windows.flatten())], 16, max_windows=3) == expected

    def test_the_datasets_own_number_of_windows(self, model, tokenizer, forwards, monkeypatch):
        documents = Documents([text(random_ids(100))], "c4", separator=" ", max_windows=4)
        roles = []
        monkeypatch.setattr(evaluation, "load_documents", lambda dataset, role, _: roles.append(role) or documents)
        evaluate_perplexity(model, tokenizer, "c4", 10)
        assert len(forwards) == 4 and roles == ["test"]
        evaluate_perplexity(model, tokenizer, "c4", 10, max_windows=6)
        assert len(forwards) == 10

    def test_loss_is_float32_in_any_dtype(self, model):
        torch.nn.init.zeros_(model.lm_head.weight)
        assert evaluate_perplexity(model.bfloat16(), None, random_ids(3, 16)) == pytest.approx(VOCAB, rel=1e-6)

    def test_beyond_a_float(self, model):
        torch.nn.init.constant_(model.lm_head.weight, 1e3)
        model.lm_head.weight.data[1:] *= -1
        model.model.norm.weight.data.fill_(10)
        assert evaluate_perplexity(model, None, random_ids(3, 16)) == math.inf


class TestModelIsLeftAsItWas:
    def test_modes_return(self, model):
        model.train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()]
        seen = []
        model.register_forward_pre_hook(lambda *_: seen.append(any(module.training for module in model.modules())))
        evaluate_perplexity(model, None, random_ids(1, 8))
        assert [module.training for module in model.modules()] == before and seen == [False]

    def test_modes_return_after_an_error(self, model):
        model.train()
        model.lm_head.weight.data[0] = torch.nan
        with pytest.raises(ValueError):
            evaluate_perplexity(model, None, random_ids(1, 8))
        assert all(module.training for module in model.modules())

    def test_no_gradient_and_no_cache(self, model):
        outputs = []
        model.register_forward_hook(lambda module, args, output: outputs.append(output))
        evaluate_perplexity(model, None, random_ids(1, 8))
        assert not outputs[0].logits.requires_grad and outputs[0].past_key_values is None and model.config.use_cache


class TestErrors:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_loss_is_not_finite(self, model, value):
        model.lm_head.weight.data[3] = value
        with pytest.raises(ValueError, match="The loss is nan in windows 0 to 1"):
            evaluate_perplexity(model, None, random_ids(3, 8), batch_size=2)

    def test_too_little_text(self, model, tokenizer):
        with pytest.raises(ValueError, match="holds 9 tokens, fewer than one window of 10"):
            evaluate_perplexity(model, tokenizer, [text(range(9))], 10)

    @pytest.mark.parametrize("bad", [-1, VOCAB])
    def test_ids_outside_the_vocabulary(self, model, bad):
        with pytest.raises(ValueError, match=f"vocabulary has {VOCAB} entries"):
            evaluate_perplexity(model, None, [[0, bad]])

    def test_longer_than_the_model_admits(self, model, tokenizer):
        with pytest.raises(ValueError, match="seq_length=33, but this model admits 1 to 32"):
            evaluate_perplexity(model, tokenizer, ["text"], 33)
        with pytest.raises(ValueError, match="seq_length=33, but this model admits 1 to 32"):
            evaluate_perplexity(model, None, random_ids(2, 33))

    def test_length_of_the_ids(self, model):
        with pytest.raises(ValueError, match="sequences of 8, but seq_length=16"):
            evaluate_perplexity(model, None, random_ids(2, 8), 16)
        with pytest.raises(ValueError, match="sequences of 1 token"):
            evaluate_perplexity(model, None, random_ids(2, 1))

    def test_no_tokenizer(self, model):
        with pytest.raises(ValueError, match="needs a tokenizer"):
            evaluate_perplexity(model, None, ["text"])

    @pytest.mark.parametrize("name, value", [("seq_length", 1), ("max_windows", 0), ("batch_size", 0)])
    def test_numbers(self, model, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value}: expected a whole number of at least"):
            evaluate_perplexity(model, None, random_ids(2, 8), **{name: value})

    def test_no_head(self):
        with pytest.raises(ValueError, match="LlamaModel has no causal language-model head"):
            evaluate_perplexity(LlamaModel(LlamaConfig(**CONFIG)), None, random_ids(2, 8))

    def test_weights_on_meta(self, model):
        with pytest.raises(ValueError, match="on the meta device"):
            evaluate_perplexity(model.to("meta"), None, random_ids(2, 8))


@pytest.mark.parametrize("model", [None, 5])
def test_what_is_no_model(model, ids):
    with pytest.raises(TypeError, match=f"model is {model!r}: expected a causal language model"):
        evaluate_perplexity(model, None, ids)


def test_a_model_may_be_named(model, tokenizer, tmp_path):
    """With the tokenizer that lies there, if text asks for one."""
    model.save_pretrained(tmp_path)
    ids = random_ids(3, 16)
    assert evaluate_perplexity(str(tmp_path), dataset=ids) == evaluate_perplexity(model, None, ids)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        evaluate_perplexity(tmp_path, dataset=[text(range(40))])
    tokenizer.save_pretrained(tmp_path)
    expected = evaluate_perplexity(model, tokenizer, [text(range(40))], 16)
    assert evaluate_perplexity(tmp_path, None, [text(range(40))], 16) == expected
