import json
import logging
import sys
from pathlib import Path

import accelerate
import datasets
import pytest
import torch
from conftest import make_model
from profiles import at_night
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optimum_neuronal.evaluation import tasks
from optimum_neuronal.evaluation.tasks import GROUPS, TaskResult, evaluate_tasks


TASKS = Path(__file__).parents[1] / "fixtures" / "tasks"
QUESTIONS = [json.loads(line) for line in (TASKS / "words.json").read_text().splitlines()]
needs_harness = pytest.mark.usefixtures("harness")


@pytest.fixture
def harness(monkeypatch, tmp_path):
    """The installed harness, its data prepared in a folder of the test; `words.json` is named relative to the tests'."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(TASKS)


@pytest.fixture
def tokenizer():
    """The word "w7" is the id 7; without a padding token."""
    backend = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(63)}, "</s>": 63}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def evaluate(model, tokenizer, names=("neuronal_words",), **options):
    return evaluate_tasks(model, tokenizer, names, include_path=TASKS, **options)


def log_likelihood(model, question, answer):
    """In float32: of the answer's tokens after the question's."""
    first, ids = len(question.split()), [int(word[1:]) for word in f"{question} {answer}".split()]
    with torch.no_grad():
        log_probabilities = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(log_probabilities[i - 1, ids[i]].item() for i in range(first, len(ids)))


def by_hand(model, questions):
    right = 0
    for row in questions:
        likelihoods = [log_likelihood(model, row["question"], choice) for choice in row["choices"]]
        right += likelihoods.index(max(likelihoods)) == row["answer"]
    return right / len(questions)


@needs_harness
class TestResult:
    @pytest.mark.parametrize("family, batch_size", [("llama", 1), ("llama", 7), ("gpt2", 3), ("qwen3", 100)])
    def test_equals_the_accuracy_by_hand(self, family, batch_size, tokenizer):
        model = make_model(family)
        result = evaluate(model, tokenizer, batch_size=batch_size)["neuronal_words"]
        accuracy, samples = by_hand(model, QUESTIONS), len(QUESTIONS)
        assert 0 < accuracy < 1
        stderr = pytest.approx((accuracy * (1 - accuracy) / (samples - 1)) ** 0.5)
        assert result == TaskResult(pytest.approx(accuracy), stderr, "acc", samples)

    def test_what_the_harness_calls_its_standard_error(self, llama, tokenizer):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        result = evaluate(llama, tokenizer)["neuronal_words"]
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        stock = lm_eval.simple_evaluate(
            HFLM(pretrained=llama, tokenizer=tokenizer), tasks=["neuronal_words"], task_manager=manager, num_fewshot=0
        )["results"]["neuronal_words"]
        assert result.accuracy == stock["acc,none"] and result.stderr == pytest.approx(stock["acc_stderr,none"])

    def test_the_model_matters(self, llama, tokenizer):
        other = make_model("llama", seed=1)
        assert evaluate(other, tokenizer)["neuronal_words"].accuracy == pytest.approx(by_hand(other, QUESTIONS))
        assert by_hand(other, QUESTIONS) != by_hand(llama, QUESTIONS)

    def test_limit(self, llama, tokenizer):
        result = evaluate(llama, tokenizer, limit=5)["neuronal_words"]
        assert result.samples == 5 and result.accuracy == pytest.approx(by_hand(llama, QUESTIONS[:5]))

    def test_one_question_has_no_standard_error(self, llama, tokenizer):
        result = evaluate(llama, tokenizer, limit=1)["neuronal_words"]
        assert result.samples == 1 and result.stderr is None

    def test_a_task_named_twice_or_alone(self, llama, tokenizer):
        once = evaluate(llama, tokenizer)
        assert (
            evaluate(llama, tokenizer, ["neuronal_words"] * 2) == evaluate(llama, tokenizer, "neuronal_words") == once
        )

    def test_half_precision(self, tokenizer):
        model = make_model("llama").bfloat16()
        assert evaluate(model, tokenizer)["neuronal_words"].accuracy == pytest.approx(by_hand(model, QUESTIONS))

    def test_offloaded_weights(self, llama, tokenizer, tmp_path):
        expected = evaluate(llama, tokenizer)
        llama.save_pretrained(tmp_path / "model")
        device_map = {"model.embed_tokens": "disk", "model": "disk", "lm_head": "cpu"}
        offloaded = accelerate.load_checkpoint_and_dispatch(
            make_model("llama", seed=5), str(tmp_path / "model"), device_map, offload_folder=str(tmp_path / "offload")
        )
        assert offloaded.device.type == "meta" and evaluate(offloaded, tokenizer) == expected

    def test_the_papers_tasks_are_the_harness_s(self, llama, tokenizer, monkeypatch):
        loaded = []
        monkeypatch.setattr(tasks, "_load_tasks", lambda names, path: loaded.extend(names) or {"tasks": {}})
        monkeypatch.setattr(tasks, "_run", lambda *_: {})
        assert evaluate_tasks(llama, tokenizer, ["boolq", "paper"]) == {}
        assert loaded == ["boolq", *(name for name in GROUPS["paper"] if name != "boolq")]


@needs_harness
class TestNothingElseChanges:
    def test_modes_generators_and_tokenizer(self, llama, tokenizer):
        llama.train()
        llama.model.layers[0].eval()
        before = [module.training for module in llama.modules()]
        seen, state = [], torch.get_rng_state()
        llama.register_forward_pre_hook(lambda *_: seen.append(any(module.training for module in llama.modules())))
        evaluate(llama, tokenizer, limit=2)
        assert [module.training for module in llama.modules()] == before and set(seen) == {False}
        assert torch.equal(torch.get_rng_state(), state) and tokenizer.pad_token is None

    def test_level_of_the_harness_s_log_returns(self, llama, tokenizer):
        level = logging.getLogger("lm_eval").level
        with pytest.raises(ValueError):
            evaluate(llama, tokenizer, ["neuronal_prose"])
        assert logging.getLogger("lm_eval").level == level


class TestErrors:
    @pytest.mark.parametrize("name", ["limit", "batch_size"])
    def test_numbers(self, llama, tokenizer, name):
        with pytest.raises(ValueError, match=f"{name} is 0: expected a whole number of at least 1"):
            evaluate(llama, tokenizer, **{name: 0})

    def test_no_task(self, llama, tokenizer):
        with pytest.raises(ValueError, match="tasks is empty"):
            evaluate(llama, tokenizer, [])

    def test_include_path(self, llama, tokenizer, tmp_path):
        with pytest.raises(ValueError, match="absent' is not a folder"):
            evaluate_tasks(llama, tokenizer, ["x"], include_path=tmp_path / "absent")

    def test_no_tokenizer(self, llama, tokenizer):
        with pytest.raises(ValueError, match="need a tokenizer"):
            evaluate(llama, None)
        tokenizer.eos_token = None
        with pytest.raises(ValueError, match="no bos_token and no eos_token"):
            evaluate(llama, tokenizer)

    def test_model(self, llama, tokenizer):
        with pytest.raises(ValueError, match="LlamaModel has no causal language-model head"):
            evaluate(llama.model, tokenizer)
        with pytest.raises(ValueError, match="on the meta device"):
            evaluate(llama.to("meta"), tokenizer)

    @needs_harness
    @pytest.mark.parametrize("known", ["neuronal_words", pytest.param("paper", marks=at_night)])
    def test_unknown_task(self, llama, tokenizer, known):
        """The harness knows the seven of the paper, but takes half a minute to find them."""
        llama.forward = None  # it must not run
        with pytest.raises(ValueError, match="Unknown task 'neuronal_word'. Did you mean 'neuronal_words'"):
            evaluate(llama, tokenizer, [known, "neuronal_word"])

    @needs_harness
    def test_task_without_accuracy(self, llama, tokenizer):
        llama.forward = None
        with pytest.raises(ValueError, match="'neuronal_prose' has no metric 'acc' but word_perplexity"):
            evaluate(llama, tokenizer, ["neuronal_words", "neuronal_prose"])

    @needs_harness
    def test_nan(self, llama, tokenizer):
        llama.lm_head.weight.data[3] = torch.nan
        with pytest.raises(ValueError, match="is nan in question 0 of the task 'neuronal_words'"):
            evaluate(llama, tokenizer)

    def test_harness_is_not_installed(self, llama, tokenizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
        with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[eval\]"):
            evaluate(llama, tokenizer)

    @needs_harness
    def test_what_the_harness_s_models_need_is_not_installed(self, llama, tokenizer, monkeypatch):
        monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
        with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[eval\]"):
            evaluate(llama, tokenizer)
