import os

import pytest
from killed_saves import in_child

from optimum_neuronal.files.scratch import scratch_directory


FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that it forks")


def test_it_is_gone_at_the_end_whatever_happens(tmp_path):
    with pytest.raises(ZeroDivisionError), scratch_directory(tmp_path, ".x.weights") as directory:
        assert directory.parent.parent == tmp_path and not list(directory.iterdir())
        (directory / "file").write_text("large")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@FORK
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    def killed():
        with scratch_directory(tmp_path, ".x.weights") as directory:
            (directory / "file").write_text("large")
            os.kill(os.getpid(), 9)

    assert in_child(killed) == -9
    strangers = [tmp_path / name for name in (".x.weights-mine", ".y.weights-12345678", ".x.weights")]
    for stranger in strangers:
        stranger.mkdir()
    assert len(list(tmp_path.iterdir())) == 4
    with scratch_directory(tmp_path, ".x.weights"):
        pass
    assert sorted(tmp_path.iterdir()) == sorted(strangers), "and no other name is touched"


@FORK
def test_what_is_in_use_stays(tmp_path):
    def other():
        with scratch_directory(tmp_path, ".x.weights"):
            pass

    with scratch_directory(tmp_path, ".x.weights") as directory:
        assert in_child(other) == 0
        assert list(tmp_path.iterdir()) == [directory.parent] and directory.is_dir()
