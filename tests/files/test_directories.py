import os

import pytest

from optimum_neuronal.files.directories import check_apart, check_writable, is_same


@pytest.mark.parametrize(
    "name, error, message",
    [
        ("", ValueError, "Cannot save to '': the name is empty. Name a directory, or '.' for this one"),
        ("a\0b", ValueError, "cannot hold a NUL"),
        ("x" * 300, OSError, "name too long: .*x{300}"),
    ],
)
def test_names_that_no_model_can_be_saved_under(name, error, message):
    with pytest.raises(error, match=message):
        check_writable(name, "save to")


@pytest.mark.skipif(os.name != "posix", reason="names are text there")
def test_a_name_that_is_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"Cannot save to b'.*\\xff': the name is not UTF-8") as caught:
        check_writable(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), "save to")
    str(caught.value).encode()


def test_what_can_be_written_is_returned_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_writable("new/model", "save to") == tmp_path / "new" / "model" and not list(tmp_path.iterdir())
    assert check_writable(".", "save to") == tmp_path


@pytest.mark.parametrize(
    "work, output, how",
    [
        ("w", "w", "is also"),
        ("w", "w/model", "holds"),
        ("o/w", "o", "lies within"),
        ("link", "w/model", "holds"),
        (".", "o", "holds"),
    ],
)
def test_overlaps_are_refused(tmp_path, monkeypatch, work, output, how):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").mkdir()
    (tmp_path / "link").symlink_to("w")
    with pytest.raises(ValueError, match=f"The work directory {work} {how} the output {output}: name another"):
        check_apart(work, output)
    check_apart("w", "w2")
    check_apart("w/a", "w/b")


def test_the_same_place_by_another_way(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "place")
    assert is_same(tmp_path / "link", tmp_path / "absent" / ".." / "place")
    assert not is_same(tmp_path / "place", tmp_path)
