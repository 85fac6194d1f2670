import csv
import os

import datasets
import pytest
from texts import document, draw

from optimum_neuronal.data.documents import load_documents


class TestFiles:
    def test_txt_is_one_stream(self, tmp_path, tokenizer):
        path = tmp_path / "book.txt"
        path.write_text(document(0, 100).replace("w50 ", "w50\n\n"))
        result = draw(path, tokenizer)
        assert result.drawn_from == "stream" and result.source == "book.txt"
        assert load_documents(str(path)).joined

    def test_jsonl(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a\u2028b", "code": "c"}\n\n{"text": "d", "code": "e"}\n', encoding="utf-8")
        assert list(load_documents(path)) == ["a\u2028b", "d"]
        assert list(load_documents(f"{path}:code")) == ["c", "e"]

    @pytest.mark.parametrize(
        "line, message",
        [
            ("{", "Line 2 .* is not JSON"),
            ("[" * 100_000, "Line 2 .* is nested too deeply"),
            ('{"text": "\\ud800"}', r"Document 1 of data.jsonl .* at character 0 is a lone surrogate, '.ud800'"),
            ("[1]", "no object with the key 'text', it is: list"),
            ('{"x": 1}', "keys x"),
        ],
    )
    def test_jsonl_errors(self, tmp_path, line, message):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a"}\n' + line)
        with pytest.raises(ValueError, match=message):
            load_documents(path)

    def test_csv(self, tmp_path):
        path = tmp_path / "data.csv"
        long = "word " * 40_000  # beyond the csv module's own limit
        path.write_text(f'\ufeffid,text\r\n1,"a, ""b""\nc"\r\n\r\n2,{long}\r\n', encoding="utf-8", newline="")
        limit = csv.field_size_limit()
        assert list(load_documents(path)) == ['a, "b"\nc', long]
        assert list(load_documents(f"{path}:id")) == ["1", "2"]
        assert load_documents(path).source == "data.csv, column text" and csv.field_size_limit() == limit
        path.write_text("body\nonly one column\n")
        assert list(load_documents(path)) == ["only one column"]

    @pytest.mark.parametrize(
        "content, message",
        [
            ("one,two\na,b\n", "no column 'text', it has: one, two"),
            (
                "text,n\na, b,c\n",
                "Line 2 of .* ends a row of 3 fields, where the header names 2: put text with commas",
            ),
            ("a,a\n1,2\n", "no header of different names"),
            ("", "no header of different names"),
            ('text\n"a', "could not be read as CSV: unexpected end of data"),
        ],
    )
    def test_csv_errors(self, tmp_path, content, message):
        (tmp_path / "data.csv").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_documents(tmp_path / "data.csv")

    @pytest.mark.parametrize("name", ["a[1].parquet", "b*.parquet", "b?.parquet", "**.parquet", "{a,b}.parquet"])
    def test_a_parquet_file_is_the_one_named(self, tmp_path, name):
        for other in ("a1.parquet", "b1.parquet", "b2.parquet", name):
            datasets.Dataset.from_dict({"text": [f"of {other}"]}).to_parquet(tmp_path / other)
        assert list(load_documents(tmp_path / name)) == [f"of {name}"]
        assert load_documents(tmp_path / name).source == f"{name}, column text"

    def test_a_parquet_file_is_read_anew(self, tmp_path):
        path, times = tmp_path / "data.parquet", []
        for text in ("old", "new"):
            datasets.Dataset.from_dict({"text": [text], "more": [1]}).to_parquet(path)
            times = times or [path.stat().st_atime_ns, path.stat().st_mtime_ns]
            os.utime(path, ns=tuple(times))
            assert list(load_documents(path)) == [text]

    def test_parquet(self, tmp_path):
        path = str(tmp_path / "data.parquet")
        datasets.Dataset.from_dict({"text": ["a", "b"], "code": ["c", "d"]}).to_parquet(path)
        assert list(load_documents(path)) == ["a", "b"]
        assert list(load_documents(path + ":code")) == ["c", "d"]
        with pytest.raises(ValueError, match="no column 'nope', it has: text, code"):
            load_documents(path + ":nope")
        (tmp_path / "broken.parquet").write_text("no parquet")
        with pytest.raises(ValueError, match="could not be read as parquet"):
            load_documents(tmp_path / "broken.parquet")

    def test_wrong_files(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="gone.txt' does not exist"):
            load_documents(tmp_path / "gone.txt")
        with pytest.raises(FileNotFoundError, match="gone.jsonl' does not exist"):
            load_documents("gone.jsonl:code")
        with pytest.raises(ValueError, match="is a folder"):
            load_documents(tmp_path)
        for name, content, message in [("a.docx", b"a", "of an unknown kind"), ("latin.txt", b"\xe9", "not UTF-8")]:
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=message):
                load_documents(tmp_path / name)
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(ValueError, match="has no column 'code'"):
            load_documents(f"{tmp_path / 'a.txt'}:code")
