"""Measure zero-shot accuracy with lm-eval on tasks of local text, for dense, sparse and quantised models.

    python -m benchmarks.zero_shot --models demo DIR ... [--bigbench FILE ...] [--variants NAME ...] [--sparsities 0.6 ...]

The made task: choose the true continuation of a passage of a model's held-out text among four. The other three continue other
passages of that text. Every question breaks a line of text at a space between two words, and passages do not overlap. A
model directory has one text, `heldout.txt`, or a part of the questions comes from each `heldout-*.txt`.

A FILE is a multiple-choice task of BIG-bench, in its JSON format; `pip download --no-deps bigbench==1.0.0` has them. If the
dense model is not above chance at a task by three standard errors, the table says so, and the other models are not asked.
Every measured model appends a line to benchmarks/zero_shot.jsonl, and what that file has is skipped, so that an interrupted
run goes on. docs/evidence/index.md has what this measured.
"""

import argparse
import copy
import json
import random
import re
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from benchmarks.few_bits import quantise_as
from benchmarks.ladder_losses import VARIANTS, lines, prune_as
from benchmarks.methods import load
from optimum_neuronal.common.display import format_markdown
from optimum_neuronal.demo.run import TINY_MODEL
from optimum_neuronal.evaluation.tasks import evaluate_tasks


RESULTS = Path(__file__).with_suffix(".jsonl")
QUESTIONS, CHOICES, SEED = 250, 4, 0
CONTEXT, CONTINUATION = 150, 40  # characters, before they are cut to whole words
SIGNIFICANT = 3  # standard errors above chance


def questions_of_text(text: str, count: int = QUESTIONS, seed: int = SEED) -> list[dict]:
    """Return questions, "choices" and the index of the true one, "answer": a passage from each of some equal parts of a text."""
    generator, size, passages = random.Random(seed), 2 * (CONTEXT + CONTINUATION), []
    for start in range(0, len(text), size):
        part = text[start : start + size]
        breaks = [match.start() for match in re.finditer(r"(?<=\w) (?=\w)", part)]
        if fitting := [place for place in breaks if CONTEXT <= place < len(part) - CONTINUATION]:
            place = generator.choice(fitting)
            context, continuation = part[place - CONTEXT : place], part[place + 1 : place + 1 + CONTINUATION]
            passages.append([context.split(maxsplit=1)[-1], continuation.rsplit(maxsplit=1)[0]])
    questions = []
    for context, right in generator.sample(passages, min(count, len(passages))):
        others = sorted({other for _, other in passages} - {right})
        choices = [right, *generator.sample(others, CHOICES - 1)]
        generator.shuffle(choices)
        questions.append({"question": context, "choices": choices, "answer": choices.index(right)})
    return questions


def questions_of_bigbench(path: Path, count: int = QUESTIONS, seed: int = SEED) -> list[dict]:
    """Return questions of a JSON file of BIG-bench with one right answer each, drawn at random."""
    task = json.loads(path.read_text(encoding="utf-8"))
    examples = [example for example in task["examples"] if list(example["target_scores"].values()).count(1) == 1]
    drawn = random.Random(seed).sample(examples, min(count, len(examples)))
    prefix = task.get("example_output_prefix", "").rstrip()
    return [
        {
            "question": example["input"].rstrip() + prefix,
            "choices": list(example["target_scores"]),
            "answer": list(example["target_scores"].values()).index(1),
        }
        for example in drawn
    ]


def make_tasks(name: str, bigbench: list[Path]) -> dict[str, list[dict]]:
    """Return questions by task for a model."""
    folder = TINY_MODEL if name == "demo" else Path(name)
    texts = sorted(folder.glob("heldout-*.txt")) or [folder / "heldout.txt"]
    made = [questions_of_text(text.read_text(encoding="utf-8"), QUESTIONS // len(texts)) for text in texts]
    tasks = {"continuations": [question for questions in made for question in questions]}
    names = {file.parent.name if file.stem == "task" else file.stem: file for file in bigbench}
    return tasks | {f"bigbench-{task}": questions_of_bigbench(file) for task, file in names.items()}


def write_task(folder: Path, name: str, questions: list[dict]) -> None:
    """Write a task for lm-eval: a file of questions, and a YAML file, which may be written in JSON."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)) + "\n", encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")


def ask(model, tokenizer, tasks: dict[str, list[dict]]) -> dict[str, list[float]]:
    """Return accuracy and standard error by task."""
    with tempfile.TemporaryDirectory() as folder:
        for name, questions in tasks.items():
            write_task(Path(folder), name, questions)
        found = evaluate_tasks(model, tokenizer, list(tasks), batch_size=16, include_path=folder)
    return {name: [round(result.accuracy, 4), round(result.stderr, 4)] for name, result in found.items()}


def chance(questions: list[dict]) -> float:
    """Return the accuracy of a guess."""
    return sum(1 / len(question["choices"]) for question in questions) / len(questions)


def measure(name: str, rows: list[dict], bigbench: list[Path], output: Path) -> None:
    """Append what is missing of one model: the dense one first, and the others on the tasks it is above chance at."""
    dense, ids, _ = load(name)
    ids, tokenizer = torch.as_tensor(ids), AutoTokenizer.from_pretrained(TINY_MODEL if name == "demo" else name)
    tasks = make_tasks(name, bigbench)
    for row in [{"variant": "dense"}, *rows]:
        row, known = {"model": Path(name).name} | row, {}
        for line in lines(output):
            known |= line["accuracy"] if row.items() <= line.items() else {}
        start, model, made = time.perf_counter(), copy.deepcopy(dense), dict(row)
        if missing := {task: questions for task, questions in tasks.items() if task not in known}:
            if "sparsity" in row:
                prune_as(row["variant"], row["sparsity"], model, ids)
            elif row["variant"] != "dense":
                made["bits"] = round(quantise_as(row["variant"], model, ids), 2)
            found = ask(model, tokenizer, missing)
            seconds = round(time.perf_counter() - start)
            made |= {
                "accuracy": found,
                "chance": {task: chance(missing[task]) for task in missing},
                "seconds": seconds,
            }
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")
            known |= found
        if row["variant"] == "dense":
            tasks = {task: tasks[task] for task in tasks if above_chance(*known[task], chance(tasks[task]))}


def above_chance(accuracy: float, stderr: float, guess: float) -> bool:
    """Return whether an accuracy is above chance by three standard errors."""
    return accuracy - guess > SIGNIFICANT * stderr


def report(found: list[dict]) -> str:
    """Return a table in Markdown for each model, and a list of its tasks at chance."""
    parts = []
    for name in dict.fromkeys(line["model"] for line in found):
        cells: dict[str, dict[str, list[float]]] = {}
        guess: dict[str, float] = {}
        for line in (line for line in found if line["model"] == name):
            row = f"{line['variant']}, {line['sparsity']:.0%} zeros" if "sparsity" in line else line["variant"]
            row += f": {line['bits']} bits a weight" if "bits" in line else ""
            cells[row] = cells.get(row, {}) | line["accuracy"]
            guess |= line["chance"]
        used = [task for task in guess if above_chance(*cells["dense"][task], guess[task])]
        header = [name, *(f"{task}, chance {guess[task]:.0%}" for task in used)]
        rows = [[row, *(shown(values.get(task)) for task in used)] for row, values in cells.items()]
        skipped = [
            f"{task} {shown(cells['dense'][task])} (chance {guess[task]:.0%})" for task in guess if task not in used
        ]
        parts += [format_markdown(header, rows)] if used else []
        parts += [f"{name}, not above chance, skipped: {'; '.join(skipped)}"] if skipped else []
    return "\n\n".join(parts)


def shown(result: list[float] | None) -> str:
    """Return an accuracy and its standard error in percent."""
    return "-" if result is None else f"{result[0]:.1%} ± {result[1]:.1%}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo"], help="demo, or model directories (default: demo)")
    parser.add_argument("--bigbench", nargs="*", type=Path, default=[], help="JSON files of BIG-bench's tasks")
    drawn = ["Wanda, uniform", "ALPS, search, heads rotated"]  # of a model with a tied head, the latter is the default
    parser.add_argument("--variants", nargs="*", default=drawn, choices=VARIANTS, help="(default: %(default)s)")
    parser.add_argument("--sparsities", nargs="*", type=float, default=[0.6, 0.7], help="(default: %(default)s)")
    parser.add_argument(
        "--bits", nargs="*", default=["2.4"], help="rows of benchmarks.few_bits (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="(default: benchmarks/zero_shot.jsonl)")
    args = parser.parse_args()
    logging.disable_progress_bar()
    rows = [{"variant": variant, "sparsity": sparsity} for sparsity in args.sparsities for variant in args.variants]
    for name in args.models:
        measure(name, rows + [{"variant": row} for row in args.bits], args.bigbench, args.output)
    print(report(lines(args.output)))


if __name__ == "__main__":
    main()
