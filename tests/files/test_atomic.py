import os
import random
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import killed_saves
import pytest
from conftest import make_model
from killed_saves import CHECKPOINT, NEW, OLD, content, in_child, make, of_weights, write
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
@pytest.mark.parametrize("way", ["at once", "two renamings", "one by one"])
def test_a_kill_at_any_step(tmp_path, way):
    if way == "at once" and sys.platform not in ("linux", "darwin"):
        pytest.skip("cannot be done here")
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
        found = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
        assert found in files
        outcomes.append(found == files[1 - now])
        now = files.index(found)
    assert 0 < sum(outcomes) < kills, "kills came before and after the exchange"
    pruners[0].save(models[0], tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model"], "what killed saves have left is gone"


def test_an_exception_leaves_everything(directory):
    with pytest.raises(RuntimeError), atomic.replaced_directory(directory, of_weights, last="config.json") as staging:
        (staging / "config.json").write_text("new")
        raise RuntimeError("stop")
    assert content(directory) == OLD and len(list(directory.parent.iterdir())) == 1


@FORK
def test_what_a_running_save_writes_is_not_removed(directory):
    """And only names of this pattern are ever removed."""
    names = (".model.unfinished", ".model.saving-12", ".other.saving-12345678")
    strangers = [directory.parent / name for name in names]
    for stranger in strangers:
        stranger.mkdir()
    with atomic.replaced_directory(directory, of_weights, last="config.json") as staging:
        (staging / "config.json").write_text("last")
        assert in_child(lambda: write(directory, "new")) == 0
        assert content(directory) == NEW and staging.exists()
    assert (directory / "config.json").read_text() == "last"
    assert all(stranger.exists() for stranger in strangers)


def test_a_link_stays_a_link(directory, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(directory)
    (directory / "link-to-notes").symlink_to("notes.txt")
    directory.chmod(0o750)
    before = (directory / "notes.txt").stat().st_ino
    write(link, "new")
    assert link.is_symlink() and content(directory) == {**NEW, "link-to-notes": "mine"}
    assert (directory / "link-to-notes").is_symlink() and (directory / "notes.txt").stat().st_ino == before
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750


def test_without_hard_links_files_are_copied(directory, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    write(directory, "new")
    assert content(directory) == NEW


def test_the_working_directory_stays_where_it_is(directory, monkeypatch):
    """A shell that stands in it would else be left in the old one."""
    monkeypatch.chdir(directory / "runs")
    before = directory.stat().st_ino
    write(directory, "new")
    assert content(directory) == NEW and directory.stat().st_ino == before and Path.cwd() == directory / "runs"


def test_extended_attributes_stay(directory):
    try:
        os.setxattr(directory, "user.note", b"mine")
    except (AttributeError, OSError):
        pytest.skip("has no extended attributes")
    write(directory, "new")
    assert content(directory) == NEW and os.listxattr(directory) == ["user.note"]
    assert os.getxattr(directory, "user.note") == b"mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives directories away")
def test_owner_and_group_stay_and_new_files_inherit_the_group(directory):
    os.chown(directory, 1234, 5678)
    directory.chmod(0o2775)
    write(directory, "new")
    about = directory.stat()
    assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (1234, 5678, 0o2775)
    assert content(directory) == NEW and (directory / "model.safetensors").stat().st_gid == 5678


def test_a_directory_that_cannot_be_given_away_is_kept(directory, monkeypatch):
    """Files are then replaced one by one, so that its owner stays."""
    number = os.stat(directory).st_ino

    def refuse(*_args):
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "chown", refuse)
    write(directory, "new")
    assert content(directory) == NEW and os.stat(directory).st_ino == number
    assert os.listdir(directory.parent) == [directory.name]


def test_a_folder_that_is_called_like_weights_stays(directory):
    (directory / "old.safetensors").mkdir()
    (directory / "old.safetensors" / "notes").write_text("mine")
    write(directory, "new")
    assert (directory / "old.safetensors" / "notes").read_text() == "mine"


@pytest.mark.parametrize("what", ["many files", "another disk", "not to be read"])
def test_what_cannot_be_linked_is_left_where_it_is(directory, monkeypatch, what):
    """Files are then replaced one by one."""
    before = (directory / "runs").stat().st_ino
    if what == "many files":
        monkeypatch.setattr(atomic, "MOST_ENTRIES", 3)
    elif what == "another disk":
        real = Path.stat
        other = SimpleNamespace(st_dev=-1)
        monkeypatch.setattr(Path, "stat", lambda self, **kw: other if self.name == "runs" else real(self, **kw))
    else:
        real = os.scandir

        def refuse(path):
            if str(path).endswith("runs"):
                raise PermissionError(path)
            return real(path)

        monkeypatch.setattr(os, "scandir", refuse)
    number = os.stat(directory).st_ino
    write(directory, "new")
    monkeypatch.undo()
    assert content(directory) == NEW
    assert (directory / "runs").stat().st_ino == before and directory.stat().st_ino == number


def test_files_are_on_the_disk_before_the_exchange(directory, monkeypatch):
    """Else a power cut could leave a whole directory of empty files."""
    done, sync, rename = [], os.fsync, atomic._exchange
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append(os.fstat(handle).st_ino), sync(handle)))

    def exchange(new, old):
        assert {file.stat().st_ino for file in new.iterdir() if file.name in CHECKPOINT} <= set(done)
        rename(new, old)
        done.append("exchanged")

    monkeypatch.setattr(atomic, "_exchange", exchange)
    write(directory, "new")
    assert done.index("exchanged") >= 4 and directory.parent.stat().st_ino == done[-1]


def test_a_folder_in_the_way(directory):
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    with pytest.raises(FileExistsError, match="config.json is a folder in the way: rename it"):
        write(directory, "new")
    assert (directory / "config.json").is_dir() and (directory / "model.safetensors").read_text() == "old"


def test_two_renamings_of_which_the_second_fails(directory, monkeypatch):
    rename = os.rename

    def fail(source, target, **keywords):
        if ".saving-" in str(source) and Path(target) == directory:
            raise OSError(5, "Input/output error")
        rename(source, target, **keywords)

    monkeypatch.setattr(atomic, "_exchange_at_once", lambda new, old: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(directory, "new")
    assert content(directory) == OLD and len(list(directory.parent.iterdir())) == 1


def test_a_disk_that_refuses_the_exchange(directory, monkeypatch):
    """Two renamings take its place, and the outcome is the same."""
    if sys.platform != "linux":
        pytest.skip("looks at Linux's system call")
    assert atomic._exchange_at_once(directory, directory / "runs") is False  # one within the other
    with pytest.raises(FileNotFoundError):
        atomic._exchange_at_once(directory, directory.parent / "nothing")
    write(directory, "new")
    assert content(directory) == NEW
