import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from accelerate import disk_offload
from conftest import make_model
from packed_models import make_zeroed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optimum_neuronal import sparsify
from optimum_neuronal.evaluation import tasks
from optimum_neuronal.evaluation.tasks import TaskResult, evaluate_tasks


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
    def test_a_head_of_its_own_that_the_config_ties(self, tokenizer):
        """The harness ties weights."""
        model = make_model("llama")
        model.config.tie_word_embeddings = True
        head, expected = model.lm_head.weight, by_hand(model, QUESTIONS)
        assert evaluate(model, tokenizer)["neuronal_words"].score == expected and model.lm_head.weight is head

    def test_equals_the_accuracy_by_hand(self, tokenizer):
        for family, batch_size, count in (("llama", 7, len(QUESTIONS)), ("gpt2", 3, 8), ("qwen3", 1, 5)):
            model, questions = make_model(family), QUESTIONS[:count]
            result = evaluate(model, tokenizer, batch_size=batch_size, limit=count)["neuronal_words"]
            accuracy = by_hand(model, questions)
            stderr = pytest.approx((accuracy * (1 - accuracy) / (count - 1)) ** 0.5)
            assert result == TaskResult(pytest.approx(accuracy), stderr, count)
        assert 0 < by_hand(make_model("llama"), QUESTIONS) < 1
        for model in (make_model("llama").bfloat16(), sparsify(make_zeroed())):
            found = evaluate(model, tokenizer, batch_size=100)["neuronal_words"]
            assert found.score == pytest.approx(by_hand(model, QUESTIONS))

    def test_modes_generators_and_tokenizer_are_left_alone(self, llama, tokenizer, caplog):
        """Without the harness's warnings of what users cannot change."""
        llama.train()
        llama.model.layers[0].eval()
        before = [module.training for module in llama.modules()]
        seen, state = [], torch.get_rng_state()
        llama.register_forward_pre_hook(lambda *_: seen.append(any(module.training for module in llama.modules())))
        evaluate(llama, tokenizer, limit=2)
        assert [module.training for module in llama.modules()] == before and set(seen) == {False}
        assert torch.equal(torch.get_rng_state(), state) and tokenizer.pad_token is None
        assert "pretrained" not in caplog.text


@needs_harness
def test_mistakes(llama, tokenizer, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        evaluate(llama.model, tokenizer)
    offloaded = disk_offload(make_model("llama"), str(tmp_path))
    offloaded.hf_device_map = {"": "disk"}
    with pytest.raises(ValueError, match="need the embeddings in memory, not offloaded"):
        evaluate(offloaded, tokenizer)
    llama.lm_head.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match="A log-likelihood in the task 'neuronal_words' is NaN"):
        evaluate(llama, tokenizer)
    llama.forward = None  # it must not run
    with pytest.raises(ValueError, match="limit is 0: expected a whole number of at least 1"):
        evaluate(llama, tokenizer, limit=0)
    with pytest.raises(ValueError, match="a tokenizer with an eos_token or a bos_token"):
        evaluate(llama, PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer))
    with pytest.raises(ValueError, match="'neuronal_prose' has no metric 'acc'"):
        tasks.load_tasks(["neuronal_words", "neuronal_prose"], include_path=TASKS, accuracy_only=True)
    from lm_eval.tasks import TaskManager

    def without_own_tasks(**options):  # which take long to read
        return TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr("lm_eval.tasks.TaskManager", without_own_tasks)
    with pytest.raises(ValueError, match="Unknown task 'neuronal_word'. Did you mean 'neuronal_words'"):
        evaluate(llama, tokenizer, ["neuronal_words", "neuronal_word"])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"lm_eval is missing: pip install 'optimum-neuronal\[eval\]'"):
        evaluate(llama, tokenizer)


def test_a_metric_of_one_document_has_no_standard_error():
    """A task of three documents; only one of them has this level."""
    task = SimpleNamespace(instances=[], aggregation=lambda: {"level1": statistics.mean})
    values = {"level1,none": 1.0, "level1_stderr,none": "N/A"}
    found = tasks._result("t", task, {"results": {"t": values}, "n-samples": {"t": {"effective": 3}}}, None)
    assert (found.metric, found.score, found.stderr) == ("level1", 1.0, None)


def test_generated_answers(harness, tokenizer, tmp_path):
    """They end before a word that the model says second, or after four tokens; the harness scores them."""
    model = make_model("llama")
    model.lm_head.weight.data[63] = 0  # the end token is never the likeliest

    def written(question):
        ids = [int(word[1:]) for word in question.split()]
        for _ in range(4):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return [f"w{i}" for i in ids[-4:]]

    said = [written(row["question"]) for row in QUESTIONS]
    first, end = next(words[:2] for words in said if words[0] != words[1])
    lengths = [words.index(end, 1) if end in words[1:] else 4 for words in said]
    task = yaml.safe_load((TASKS / "prose.yaml").read_text()) | {
        "task": "neuronal_next",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": first,
        "generation_kwargs": {"until": [f" {end}"], "max_gen_toks": 4},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(task))
    metric = "metric_list: [{metric: !function own.pass_at_k, aggregation: mean, higher_is_better: true}]"
    task |= {"task": "neuronal_code"}
    del task["metric_list"]
    (tmp_path / "code.yaml").write_text(yaml.safe_dump(task) + metric)
    (tmp_path / "own.py").write_text("def pass_at_k(references, predictions): return {'pass@1': 0.25}")
    code, found = evaluate_tasks(model, tokenizer, ["neuronal_code", "neuronal_next"], include_path=tmp_path).values()
    assert (code.metric, code.score, code.stderr) == ("pass@1", 0.25, 0.0), "as humaneval names its metric"
    assert found.metric == "exact_match" and found.samples == len(QUESTIONS) and found.stderr is not None
    assert found.mean_length == sum(lengths) / len(lengths) and found.cut_off == lengths.count(4) / len(lengths) < 1
    assert found.score == sum(words[:2] == [first, end] for words in said) / len(said) > 0


def test_questions_are_read_once(harness, llama, tokenizer, monkeypatch):
    """Other models answer the same tasks, of which the first run left nothing."""
    loaded = tasks.load_tasks(["neuronal_words"], include_path=TASKS)
    assert list(loaded.files) == [str(file) for file in sorted(TASKS.glob("*.yaml"))]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("read again"))
    models = llama, make_model("gpt2"), llama
    found = [tasks.evaluate_tasks(model, tokenizer, loaded)["neuronal_words"] for model in models]
    assert found[0] == found[2] != found[1]
