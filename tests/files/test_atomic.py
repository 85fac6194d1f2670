import os
import random
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import killed_saves
import pytest
from conftest import make_model
from killed_saves import NEW, OLD, content, in_child, make, of_weights, write
from profiles import NIGHT
from transformers.utils import logging

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.files import atomic


FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "parent" / "model"
    make(path)
    assert content(path) == OLD
    return path


@FORK
@pytest.mark.parametrize("way", ["new", "replaced"])
def test_a_kill_at_any_step(tmp_path, way):
    command = [sys.executable, killed_saves.__file__, way, tmp_path / "parent" / "model"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.split()[0]) > 15, result.stdout


@pytest.fixture
def no_progress_bars():
    """Their lock is shared with forks, and would outlive one that is killed while it holds it."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@FORK
def test_kills_while_a_model_is_saved(tmp_path, tokenizer, monkeypatch, no_progress_bars):
    """Weights, config, tokenizer, report and card of one model or of the other, to the byte."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a kill is no power cut
    pruners, models, files = [], [], []
    for seed in range(2):
        models.append(make_model("llama", seed=seed, num_hidden_layers=1))
        pruners.append(
            NeuronALPruner(NeuronALConfig(0.5 + seed / 10, saliency="magnitude", topup="uniform"), tokenizer)
        )
        pruners[seed].prune(models[seed])
        start = time.perf_counter()
        assert in_child(partial(pruners[seed].save, models[seed], tmp_path / "model")) == 0
        seconds = time.perf_counter() - start
        files.append({file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()})
    assert len(files[0]) >= 6 and files[0].keys() == files[1].keys() and files[0] != files[1]
    now, chance, outcomes = 1, random.Random(0), []

    def kill(child):
        time.sleep(chance.uniform(0, 1.2) * seconds)
        os.kill(child, signal.SIGKILL)

    kills = 100 if NIGHT else 30
    for _ in range(kills):
        in_child(partial(pruners[1 - now].save, models[1 - now], tmp_path / "model"), kill)
        found = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir() if file.is_file()}
        outcomes.append(found == files[1 - now])
        if "config.json" in found:
            assert found in files
            now = files.index(found)
    assert 0 < sum(outcomes) < kills, "kills came before and after the moves"
    pruners[0].save(models[0], tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert {file.name for file in (tmp_path / "model").iterdir()} == files[0].keys(), (
        "what killed saves have left is gone"
    )


def test_an_exception_leaves_everything(directory):
    with pytest.raises(RuntimeError), atomic.replaced_directory(directory, of_weights, last="config.json") as staging:
        (staging / "config.json").write_text("new")
        raise RuntimeError("stop")
    assert content(directory) == OLD and len(list(directory.parent.iterdir())) == 1


@FORK
def test_what_a_running_save_writes_is_not_removed(directory):
    """And only names of this pattern are ever removed."""
    strangers = [directory / name for name in (".saving", ".saving-12", ".model.saving-12345678")]
    for stranger in strangers:
        stranger.mkdir()
    with atomic.replaced_directory(directory, of_weights, last="config.json") as staging:
        (staging / "config.json").write_text("last")
        assert in_child(lambda: write(directory, "new")) == 0
        assert content(directory) == NEW and staging.exists()
    assert (directory / "config.json").read_text() == "last"
    assert all(stranger.exists() for stranger in strangers)


def test_the_directory_and_the_users_files_stay_what_they_are(directory, tmp_path, monkeypatch):
    """Reached by a link, and while a shell stands in it."""
    link = tmp_path / "link"
    link.symlink_to(directory)
    (directory / "link-to-notes").symlink_to("notes.txt")
    (directory / "old.safetensors").mkdir()
    (directory / "old.safetensors" / "notes").write_text("mine")
    directory.chmod(0o750)
    numbers = [os.stat(path).st_ino for path in (directory, directory / "notes.txt")]
    monkeypatch.chdir(directory / "runs")
    write(link, "new")
    assert link.is_symlink() and (directory / "link-to-notes").is_symlink()
    assert content(directory) == {**NEW, "link-to-notes": "mine", "old.safetensors/notes": "mine"}
    assert numbers == [os.stat(path).st_ino for path in (directory, directory / "notes.txt")]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750 and Path.cwd() == directory / "runs"


def test_files_are_on_the_disk_before_they_are_moved(directory, monkeypatch):
    """Else a power cut could leave empty files. config.json is moved when all others are where they belong."""
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.fstat(handle).st_ino), sync(handle)))

    def move(source, target):
        assert source.stat().st_ino in done
        done.append(source.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", move)
    write(directory, "new")
    number = directory.stat().st_ino
    assert done[-3:] == [number, "config.json", number] and content(directory) == NEW


def test_a_folder_in_the_way(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(FileExistsError, match="config.json is a folder in the way: rename it"):
        write(directory, "new")
    assert (directory / "config.json").is_dir() and (directory / "model.safetensors").read_text() == "old"
