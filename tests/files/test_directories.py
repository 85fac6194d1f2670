import pytest

from optimum_neuronal.files.directories import check_writable, is_same


def test_what_can_be_written_is_returned_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_writable("new/model", "save to") == tmp_path / "new" / "model" and not list(tmp_path.iterdir())
    assert check_writable(".", "save to") == tmp_path
    with pytest.raises(ValueError, match="directory to save to is empty"):
        check_writable("", "save to")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="Cannot save to file/model: .*file is a file"):
        check_writable("file/model", "save to")


def test_the_same_place_by_another_way(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "place")
    assert is_same(tmp_path / "link", tmp_path / "absent" / ".." / "place")
    assert not is_same(tmp_path / "place", tmp_path)
