import json
import logging
import sys
from pathlib import Path

import accelerate
import datasets
import pytest
import torch
from conftest import make_model
from few_bits import make_few_bits
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
    def test_equals_the_accuracy_by_hand(self, tokenizer):
        for family, batch_size, questions in (
            ("llama", 7, QUESTIONS),
            ("gpt2", 3, QUESTIONS[:8]),
            ("qwen3", 1, QUESTIONS[:5]),
        ):
            model = make_model(family)
            result = evaluate(model, tokenizer, batch_size=batch_size, limit=len(questions))["neuronal_words"]
            accuracy, samples = by_hand(model, questions), len(questions)
            stderr = pytest.approx((accuracy * (1 - accuracy) / (samples - 1)) ** 0.5)
            assert result == TaskResult(pytest.approx(accuracy), stderr, "acc", samples)
        assert 0 < by_hand(make_model("llama"), QUESTIONS) < 1
        model = make_model("llama").bfloat16()
        assert evaluate(model, tokenizer, batch_size=100)["neuronal_words"].accuracy == pytest.approx(
            by_hand(model, QUESTIONS)
        )

    def test_packed_weights_and_a_head_of_8_bits(self, tokenizer):
        model = make_few_bits()
        found = evaluate(model, tokenizer, batch_size=4, limit=6)["neuronal_words"]
        assert found.accuracy == by_hand(model, QUESTIONS[:6])

    def test_what_the_harness_calls_its_standard_error(self, llama, tokenizer):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        result = evaluate(llama, tokenizer, limit=6)["neuronal_words"]
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        stock = lm_eval.simple_evaluate(
            HFLM(pretrained=llama, tokenizer=tokenizer),
            tasks=["neuronal_words"],
            task_manager=manager,
            num_fewshot=0,
            limit=6,
        )["results"]["neuronal_words"]
        assert result.accuracy == stock["acc,none"] and result.stderr == pytest.approx(stock["acc_stderr,none"])

    def test_one_question_of_a_task_named_twice_or_alone(self, llama, tokenizer):
        once = evaluate(llama, tokenizer, limit=1)
        assert once["neuronal_words"].samples == 1 and once["neuronal_words"].stderr is None
        for names in (["neuronal_words"] * 2, "neuronal_words"):
            assert evaluate(llama, tokenizer, names, limit=1) == once

    def test_offloaded_weights(self, llama, tokenizer, tmp_path):
        expected = evaluate(llama, tokenizer, limit=4)
        llama.save_pretrained(tmp_path / "model")
        device_map = {"model.embed_tokens": "disk", "model": "disk", "lm_head": "cpu"}
        offloaded = accelerate.load_checkpoint_and_dispatch(
            make_model("llama", seed=5), str(tmp_path / "model"), device_map, offload_folder=str(tmp_path / "offload")
        )
        assert offloaded.device.type == "meta" and evaluate(offloaded, tokenizer, limit=4) == expected

    def test_the_papers_tasks_are_the_harness_s(self, llama, tokenizer, monkeypatch):
        loaded = []
        monkeypatch.setattr(tasks, "_load_tasks", lambda names, path: loaded.extend(names) or {"tasks": {}})
        monkeypatch.setattr(tasks, "_run", lambda *_: {})
        assert evaluate_tasks(llama, tokenizer, ["boolq", "paper"]) == {}
        assert loaded == ["boolq", *(name for name in GROUPS["paper"] if name != "boolq")]

    def test_modes_generators_tokenizer_and_log_are_left_alone(self, llama, tokenizer):
        llama.train()
        llama.model.layers[0].eval()
        before, level = [module.training for module in llama.modules()], logging.getLogger("lm_eval").level
        seen, state = [], torch.get_rng_state()
        llama.register_forward_pre_hook(lambda *_: seen.append(any(module.training for module in llama.modules())))
        evaluate(llama, tokenizer, limit=2)
        with pytest.raises(ValueError):
            evaluate(llama, tokenizer, ["neuronal_prose"])
        assert [module.training for module in llama.modules()] == before and set(seen) == {False}
        assert torch.equal(torch.get_rng_state(), state) and tokenizer.pad_token is None
        assert logging.getLogger("lm_eval").level == level


class TestErrors:
    def test_arguments(self, llama, tokenizer, tmp_path):
        def refused(message, model=llama, given=tokenizer, names=("neuronal_words",), **options):
            with pytest.raises(ValueError, match=message):
                evaluate_tasks(model, given, names, **{"include_path": TASKS, **options})

        for name in ("limit", "batch_size"):
            refused(f"{name} is 0: expected a whole number of at least 1", **{name: 0})
        refused("tasks is empty", names=[])
        refused("absent' is not a folder", include_path=tmp_path / "absent")
        refused("need a tokenizer", given=None)
        refused("LlamaModel has no causal language-model head", llama.model)
        refused("on the meta device", make_model("llama").to("meta"))
        tokenizer.eos_token = None
        refused("no bos_token and no eos_token")

    @needs_harness
    def test_unknown_task(self, llama, tokenizer):
        llama.forward = None  # it must not run
        for known in ("neuronal_words", "paper"):
            with pytest.raises(ValueError, match="Unknown task 'neuronal_word'. Did you mean 'neuronal_words'"):
                evaluate(llama, tokenizer, [known, "neuronal_word"])

    @needs_harness
    @pytest.mark.parametrize("connected", [True, False])
    def test_data_that_cannot_be_fetched(self, llama, tokenizer, monkeypatch, connected):
        """The task is named. Without a connection the cache alone is asked, which answers at once."""
        from lm_eval.tasks import TaskManager

        load, offline = TaskManager.load, []

        def fail_for_rte(self, names):
            offline.append(datasets.config.HF_HUB_OFFLINE)
            if "rte" in str(names):
                raise ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub.")
            return load(self, names)

        monkeypatch.setattr(TaskManager, "load", fail_for_rte)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(tasks, "connection_error", lambda _: None if connected else OSError("no route to host"))
        monkeypatch.setattr(tasks, "_stock_tasks", None)  # no index of all tasks is needed
        llama.forward = None  # it must not run
        expected = r"task 'rte' cannot be read: Couldn't reach 'nyu-mll/glue' on the Hub\.$"
        if not connected:
            expected = "task 'rte' is not in the cache .* no connection to the Hub .no route to host.: .* include_path"
        with pytest.raises(OSError, match=expected):
            evaluate(llama, tokenizer, ["neuronal_words", "rte", "boolq"])
        assert offline == [not connected] * 2 and not datasets.config.HF_HUB_OFFLINE

    @needs_harness
    @at_night
    def test_a_tag_of_the_harness_and_a_task_of_ones_own(self, llama, tokenizer, monkeypatch):
        """All is indexed for a tag, whose tasks stand in other files; without their data the first one is missing."""
        with pytest.raises(OSError, match="The data of the task 'ai2_arc' is not in the cache"):
            evaluate(llama, tokenizer, ["neuronal_words", "ai2_arc"])

    @needs_harness
    def test_no_accuracy(self, llama, tokenizer):
        llama.lm_head.weight.data[3] = torch.nan
        with pytest.raises(ValueError, match="is nan in question 0 of the task 'neuronal_words'"):
            evaluate(llama, tokenizer)
        llama.forward = None
        with pytest.raises(ValueError, match="'neuronal_prose' has no metric 'acc' but word_perplexity"):
            evaluate(llama, tokenizer, ["neuronal_words", "neuronal_prose"])

    @needs_harness
    def test_the_harness_or_what_its_models_need_is_not_installed(self, llama, tokenizer, monkeypatch):
        for module in ("lm_eval.models.huggingface", "lm_eval.tasks"):
            monkeypatch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[eval\]"):
                evaluate(llama, tokenizer)
