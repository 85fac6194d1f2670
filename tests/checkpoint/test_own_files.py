import json

import pytest

from optimum_neuronal.checkpoint.own_files import MARK, check_output, find_foreign


@pytest.fixture
def saved(tmp_path):
    """A directory as a pruned model leaves it."""
    folder = tmp_path / "sparse"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"sparsity_config": {"version": 1}}))
    (folder / "neuronal_report.json").write_text(json.dumps({"files": ["processor_config.json"]}))
    for name in ("packed-00001-of-00002.safetensors", "tokenizer.json", "processor_config.json"):
        (folder / name).write_text("ours")
    (folder / "README.md").write_text(f"{MARK}\n# llama")
    return folder


def test_a_directory_of_ours_or_an_empty_one_may_be_written(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (saved, tmp_path / "empty", tmp_path / "absent"):
        assert check_output(folder) == folder
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", ["notes.txt", ".git", "model_of_mine.safetensors", "preprocessor_config.json"])
def test_what_no_command_wrote_is_refused(saved, name):
    (saved / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"sparse holds {name}, which this command did not write.*--overwrite"):
        check_output(saved)
    assert check_output(saved, own=[name]) == check_output(saved, overwrite=True) == saved


def test_another_model_is_refused_whole(saved):
    (saved / "neuronal_report.json").unlink()
    assert find_foreign(saved) == sorted(file.name for file in saved.iterdir())
    with pytest.raises(FileExistsError, match="holds README.md, config.json, packed-.* and 2 more, which"):
        check_output(saved)


def test_a_readme_without_our_mark_is_the_users(saved):
    (saved / "README.md").write_text("# alpaca")
    with pytest.raises(FileExistsError, match="holds README.md, which this command did not write.*--overwrite"):
        check_output(saved, own=["README.md"])
    check_output(saved, overwrite=True)


def test_what_a_killed_save_left_is_no_files_of_the_users(saved, tmp_path):
    (saved / ".saving-12345678").mkdir()
    (tmp_path / "new" / ".saving-12345678").mkdir(parents=True)
    for folder in (saved, tmp_path / "new"):
        assert check_output(folder) == folder


def test_the_models_own_directory_is_always_refused(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(FileExistsError, match="is the directory that the model was read from"):
        check_output(tmp_path / "link", overwrite=True, source=saved)
    check_output(saved, source="me/llama")
