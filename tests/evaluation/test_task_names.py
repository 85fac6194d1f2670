import importlib.util

import pytest
from profiles import at_night

from optimum_neuronal.evaluation import task_names
from optimum_neuronal.evaluation.task_names import GROUPS, check_task_names, find_names, stock_folder


FILES = {
    "a/plain.yaml": "task: plain  # a comment\ntag:\n  - tag_one  # one\n  - 'tag_two'\n",
    "a/quoted.yaml": '"dataset_path": "plain"\n"task": "quoted"\n"tag": [in_brackets, "second"]\ninclude: _template\n',
    "a/_template": "tag: of_template\ndescription: |\n  task: text_of_another_key\n",
    "b/group.yaml": "group: a_group\ntask:\n  - plain\n  - task: a_member\n",
    "b/again.yaml": "task: plain\n",
    "b/utils.py": "task: no_yaml\n",
}


@pytest.fixture
def stock(tmp_path, monkeypatch):
    """The harness's folder, with a few files."""
    for name, text in FILES.items():
        path = tmp_path / "stock" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folder = tmp_path / "stock"
    monkeypatch.setattr(task_names, "stock_names", lambda: find_names(folder))
    return folder


def test_names_and_files(stock):
    """The first file of a task counts, as in the harness; members of a group are named by their own files."""
    tags = ("tag_one", "tag_two", "in_brackets", "second", "of_template")
    files = {"plain": f"{stock}/a/plain.yaml", "quoted": f"{stock}/a/quoted.yaml"}
    assert find_names(stock) == {**files, "a_group": None, **dict.fromkeys(tags)}


def test_unknown_names(stock, tmp_path):
    check_task_names(["plain", "a_group", "of_template", *GROUPS])
    for name, closest in (("quotde", "quoted"), ("a-group", "a_group"), ("papre", "paper")):
        with pytest.raises(ValueError, match=f"Unknown task '{name}'. Did you mean '{closest}'. `lm-eval ls tasks`"):
            check_task_names(["plain", name])
    own = tmp_path / "own"
    own.mkdir()
    (own / "flow.yaml").write_text("{task: mine, dataset_path: json}")
    (own / "words.yaml").write_text("task: my_words")
    check_task_names(["mine", "my_words", "plain"], own)
    with pytest.raises(ValueError, match="Unknown task 'my_word'. Did you mean 'my_words'"):
        check_task_names(["mine", "my_word"], str(own))
    with pytest.raises(ValueError, match="Unknown task 'mine'"):
        check_task_names(["mine"])


def test_no_harness(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install optimum-neuronal\[eval\]"):
        stock_folder()


@at_night
def test_the_names_are_the_harness_s():
    """Its index takes half a minute. Names of templates that no task includes are more than it has."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager()
    found = find_names(stock_folder())
    assert set(manager.all_tasks) <= found.keys() and len(found) < len(manager.all_tasks) + 20
    files = {name: file for name, file in found.items() if file is not None}
    assert len(files) > 0.99 * len(manager.all_subtasks)
    assert all(str(manager.task_index[name].yaml_path) == file for name, file in files.items())
