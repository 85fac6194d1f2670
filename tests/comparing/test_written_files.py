import hashlib

import pytest

from optimum_neuronal.comparing.written_files import LIST, WrittenFiles


@pytest.fixture
def files(tmp_path):
    files = WrittenFiles(tmp_path)
    files.write({"a.md": b"a table", "b.csv": b"1,2"})
    return files


def test_the_list_is_one_of_sha256sum(files, tmp_path):
    assert (tmp_path / "a.md").read_bytes() == b"a table"
    digests = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.md", "b.csv")}
    assert (tmp_path / LIST).read_text() == f"{digests['a.md']}  a.md\n{digests['b.csv']}  b.csv\n"


def test_own_files_are_replaced(files, tmp_path):
    files.check(["a.md", "b.csv"])
    files.write({"a.md": b"another"})
    assert (tmp_path / "a.md").read_bytes() == b"another" and files.is_free("b.csv")
    files.write({"a.md": b"a third"})
    assert len((tmp_path / LIST).read_text().splitlines()) == 2, "of each the last"


@pytest.mark.parametrize("name", ["a.md", "mine.md", LIST])
def test_others_are_not(files, tmp_path, name):
    (tmp_path / name).write_text("my notes")
    with pytest.raises(FileExistsError, match="overwrite=True, --overwrite"):
        files.write({"b.csv": b"3", name: b"a table"})
    assert (tmp_path / name).read_text() == "my notes"
    assert (tmp_path / "b.csv").read_bytes() == b"1,2", "nothing is written by halves"
    WrittenFiles(tmp_path, overwrite=True).write({"a.md": b"new", "mine.md": b"new"})
    assert (tmp_path / "a.md").read_bytes() == (tmp_path / "mine.md").read_bytes() == b"new"
    files.check(["a.md", "mine.md"])


def test_figures_are_known_by_their_pattern(files, tmp_path):
    (tmp_path / "lambda.png").write_bytes(b"mine")
    files.check(["a.md"], ["row*.png"])
    with pytest.raises(FileExistsError, match="lambda.png was not written by a comparison"):
        files.check(["a.md"], ["row*.png", "lambda*.png"])


def test_an_interrupt_leaves_files_that_can_be_replaced(files, tmp_path, monkeypatch):
    from optimum_neuronal.comparing import written_files

    write = written_files.write_durably

    def interrupted(path, content):
        if path.name == "b.csv":
            raise KeyboardInterrupt
        write(path, content)

    monkeypatch.setattr(written_files, "write_durably", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write({"a.md": b"new", "b.csv": b"new"})
    monkeypatch.undo()
    assert (tmp_path / "a.md").read_bytes() == b"new" and (tmp_path / "b.csv").read_bytes() == b"1,2"
    files.check(["a.md", "b.csv"])


def test_checking_creates_nothing(tmp_path):
    files = WrittenFiles(tmp_path / "new")
    files.check(["a.md"], ["*.png"])
    assert not list(tmp_path.iterdir())
    assert files.write({"a.md": b"a table"}) == [tmp_path / "new" / "a.md"]
