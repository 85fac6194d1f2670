"""The questions that benchmarks/zero_shot.py makes, and what lm-eval answers to them without a download."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_neuronal.demo.run import TINY_MODEL


@pytest.fixture(scope="module")
def module():
    """benchmarks.zero_shot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent)
        yield importlib.import_module("benchmarks.zero_shot")


@pytest.fixture(scope="module")
def text():
    return (TINY_MODEL / "heldout.txt").read_text(encoding="utf-8")


def test_the_right_answer_continues_the_passage(module, text):
    questions = module.questions_of_text(text)
    assert len(questions) == len({question["question"] for question in questions}) == 250
    for question in questions:
        right = question["choices"][question["answer"]]
        assert len(set(question["choices"])) == 4
        assert [choice for choice in question["choices"] if f"{question['question']} {choice}" in text] == [right]
        assert all(f" {choice}" in text for choice in question["choices"])
    places = [question["answer"] for question in questions]
    assert all(30 < places.count(place) < 95 for place in range(4))


def test_a_seed_decides_the_questions(module, text):
    questions = module.questions_of_text(text, 20)
    assert questions == module.questions_of_text(text, 20)
    assert questions != module.questions_of_text(text, 20, seed=1)


def test_questions_of_bigbench(module, tmp_path):
    examples = [{"input": f"The {i} cats ", "target_scores": {"sleeps": 0, "sleep": 1}} for i in range(5)]
    file = tmp_path / "task.json"
    file.write_text(json.dumps({"examples": examples, "example_output_prefix": "\nVerb: "}))
    questions = module.questions_of_bigbench(file, 4)
    assert len({question["question"] for question in questions}) == 4
    assert all(question["question"].endswith(" cats\nVerb:") for question in questions)
    assert all(question["choices"][question["answer"]] == "sleep" for question in questions)
    assert module.chance(questions) == 0.5


class TestMeasure:
    """On two tasks of four questions each, which a stand-in for lm-eval answers; nothing is pruned in earnest."""

    ROWS = [{"variant": "Wanda, uniform", "sparsity": 0.6}, {"variant": "2.4"}]

    @pytest.fixture
    def asked(self, module, monkeypatch):
        """Variants and tasks that the models were asked."""
        asked, now = [], ["dense"]
        questions = [{"question": "a", "choices": ["b", "c"], "answer": 0}] * 4
        monkeypatch.setattr(module, "load", lambda name: ([], [[1]], {}))
        monkeypatch.setattr(module.AutoTokenizer, "from_pretrained", lambda folder: None)
        monkeypatch.setattr(module, "make_tasks", lambda name, bigbench: {"easy": questions, "hard": questions})
        monkeypatch.setattr(module, "prune_as", lambda variant, sparsity, model, ids: model.append(variant))
        monkeypatch.setattr(module, "quantise_as", lambda row, model, ids: model.append(row) or 2.4)

        def ask(model, tokenizer, tasks):
            asked.append((*(model or now), *tasks))
            return {task: [0.9 if task == "easy" else 0.6, 0.1] for task in tasks}

        monkeypatch.setattr(module, "ask", ask)
        return asked

    def test_skips_tasks_at_chance_and_what_is_measured(self, module, asked, tmp_path):
        output = tmp_path / "found.jsonl"
        module.measure("folder/3", self.ROWS[:1], [], output)
        assert asked == [("dense", "easy", "hard"), ("Wanda, uniform", "easy")]
        module.measure("folder/3", self.ROWS, [], output)
        assert asked[2:] == [("2.4", "easy")]
        report = module.report(module.lines(output))
        assert "hard 60.0% ± 10.0% (chance 50%)" in report.splitlines()[-1]
        assert "| Wanda, uniform, 60% zeros | 90.0% ± 10.0%" in report and "easy, chance 50%" in report
        assert {line["model"] for line in module.lines(output)} == {"3"}


def test_lm_eval_answers_without_a_download(module, text):
    """Its choice has the largest log-likelihood after the question, summed over its tokens."""
    model, tokenizer = (auto.from_pretrained(TINY_MODEL) for auto in (AutoModelForCausalLM, AutoTokenizer))
    tasks = {"answered": [], "mistaken": []}

    @torch.no_grad()
    def likelihood(question, choice):
        whole, first = tokenizer(f"{question} {choice}").input_ids, len(tokenizer(question).input_ids)
        predicted = model.float()(torch.tensor([whole])).logits[0, first - 1 : -1].log_softmax(-1)
        return float(predicted.gather(1, torch.tensor(whole[first:])[:, None]).sum())

    for question in module.questions_of_text(text, 10):
        found = [likelihood(question["question"], choice) for choice in question["choices"]]
        tasks["answered" if found.index(max(found)) == question["answer"] else "mistaken"].append(question)
    assert module.ask(model, tokenizer, tasks) == {"answered": [1, 0], "mistaken": [0, 0]}
