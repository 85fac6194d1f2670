"""Whatever writes, and whichever of its calls finds the disk full: what was there is whole, and nothing else is left."""

import errno
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model
from full_disk import FullDisk, count_calls, files
from profiles import NIGHT
from sweeps import state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint
from optimum_neuronal.checkpoint.save_pretrained import save_pretrained
from optimum_neuronal.comparing.comparing import _recorded as recorded
from optimum_neuronal.comparing.comparison import Comparison
from optimum_neuronal.comparing.results import Result
from optimum_neuronal.files import records as module
from optimum_neuronal.files.records import Records, work_directory


FIELDS = {"saliency": "magnitude", "topup": "uniform"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pruned model with its pruner, and the checkpoints of another one."""
    folder, pruners, models = tmp_path_factory.mktemp("made"), [], []
    for seed in range(2):
        models.append(make_model("llama", seed=seed, num_hidden_layers=1))
        pruners.append(NeuronALPruner(NeuronALConfig(0.6, **FIELDS)))
        pruners[seed].prune(models[seed])
        pruners[seed].save(models[seed], folder / f"{seed}" / "dense")
    pruners[0].save(models[0], folder / "0" / "packed", "packed")
    return SimpleNamespace(pruner=pruners[1], model=models[1], checkpoints=folder / "0")


SAVES = {
    "pruner": lambda made, directory, format: made.pruner.save(made.model, directory, format),
    "save_pretrained": lambda made, directory, format: save_pretrained(made.model, directory, format),
    "convert": lambda made, directory, format: convert_checkpoint(
        made.checkpoints / ("dense" if format == "packed" else "packed"), format, directory
    ),
}
CASES = [(save, format, old) for save in SAVES for format in ("dense", "packed") for old in (None, "dense", "packed")]
BY_DAY = {("save_pretrained", "packed", "dense"), ("pruner", "dense", None), ("convert", "dense", "packed")}


@pytest.mark.parametrize(("save", "format", "old"), [case for case in CASES if NIGHT or case in BY_DAY])
def test_a_save_is_whole_or_changes_nothing(made, tmp_path, save, format, old):
    """The directory holds the old checkpoint or the new one, nothing lies beside it, and the model is as it was."""
    place, weights = tmp_path / "place", state(made.model)
    work = partial(SAVES[save], made, place / "model", format)

    def begin():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        if old is not None:
            shutil.copytree(made.checkpoints / old, place / "model")

    begin()
    before, calls = files(place), count_calls(work)
    after, failed, config = files(place), 0, made.model.config.to_dict()
    assert before != after
    for number in range(1, calls + 1) if NIGHT else range(calls, 0, -4):
        begin()
        error = FullDisk(number).run(work)
        assert files(place) == (after if error is None else before), (number, error)
        assert not list(place.glob("**/.saving-*"))
        if error is not None:
            failed += 1
            told = f"Saving to {place / 'model'} failed, and its files are as they were: "
            assert str(error).startswith(told) and "No space left on device" in str(error)
    assert failed > calls / 8
    assert made.model.config.to_dict() == config
    assert all(torch.equal(value, made.model.state_dict()[name]) for name, value in weights.items())


def interrupted(*_args):
    raise KeyboardInterrupt


def test_ctrl_c_between_the_moves_moves_everything_back(made, tmp_path, monkeypatch):
    directory = shutil.copytree(made.checkpoints / "dense", tmp_path / "model")
    before = files(tmp_path)
    for name in ("os.replace", "os.fsync"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(name, interrupted)
            made.pruner.save(made.model, directory, "packed")
        assert files(tmp_path) == before


RESULT = Result(0.6, "wanda", "owl")
COMPARED = Comparison("model", Result(0.0, "dense", "dense"), [], {}, {})
SINGLE = {
    "report": lambda made, folder: made.pruner.report.save(folder),
    "comparison": lambda made, folder: COMPARED.save(folder, overwrite=True),
    "result": lambda made, folder: recorded(folder, True, {}, RESULT, {}, lambda: RESULT),
}


@pytest.mark.parametrize("written", SINGLE)
def test_a_single_file_is_whole_old_or_new(made, tmp_path, written):
    """The message names the file."""
    work = partial(SINGLE[written], made, tmp_path)
    work()
    after = files(tmp_path)
    for number in range(1, count_calls(work) + 1):
        for name in after:
            (tmp_path / name).write_text("old")
        error = FullDisk(number).run(work)
        found = files(tmp_path)
        assert found.keys() == after.keys() and all(found[name] in (b"old", after[name]) for name in found)
        if error is None:
            assert found == after
        else:
            assert error.errno == errno.ENOSPC and error.filename in {str(tmp_path / name) for name in after}


def prune(work_dir):
    with work_directory(work_dir) as folder:
        records = Records(folder.path, {"seed": 0})
        return [records.recorded(f"block-{number}", lambda: (1, {"x": torch.ones(3)})) for number in range(3)]


def test_records_are_lost_and_the_prune_goes_on(tmp_path, monkeypatch):
    """From its first call on, which makes the work directory."""
    warned = []
    monkeypatch.setattr(module.logger, "warning_once", warned.append)
    calls = count_calls(partial(prune, tmp_path / "counted" / "work"))
    for number in range(1, calls + 1):
        directory = tmp_path / str(number) / "work"
        assert FullDisk(number).run(partial(prune, directory)) is None, number
        assert not list(directory.glob(".*.*")), "no temporary file is left"
        assert [value for value, _ in prune(directory)] == [1, 1, 1]
    assert warned and all("the prune goes on" in text for text in warned)
