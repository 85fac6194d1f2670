import json
import os

import pytest

from optimum_neuronal.checkpoint import files
from optimum_neuronal.checkpoint.files import check_config_file, check_file, check_names, read_bytes, read_json


@pytest.fixture
def cache(tmp_path):
    """A model in the Hub's cache: every file, of a folder too, is a link to a blob."""
    (tmp_path / "models--me--llama" / "blobs").mkdir(parents=True)
    commit = tmp_path / "models--me--llama" / "snapshots" / ("0" * 40)
    (commit / "sub").mkdir(parents=True)
    for name, up in (("config.json", "../.."), ("sub/config.json", "../../..")):
        blob = tmp_path / "models--me--llama" / "blobs" / name.replace("/", "-")
        blob.write_text("{}")
        (commit / name).symlink_to(f"{up}/blobs/{blob.name}")
    return commit


def test_links_of_the_hubs_cache_are_followed(cache, tmp_path):
    assert read_json(cache, "config.json") == read_json(cache, "sub/config.json") == {}
    assert read_json(cache / "sub", "config.json") == {}
    (tmp_path / "linked").symlink_to(cache)
    assert read_json(tmp_path / "linked", "config.json") == {}


@pytest.mark.parametrize("place", ["../../refs/main", "../other/config.json", "../../../secret", "/etc/hostname"])
def test_links_to_elsewhere_are_not(cache, place):
    (cache / "config.json").unlink()
    (cache / "config.json").symlink_to(place)
    target = cache / place
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        target.write_text("{}")
    with pytest.raises(ValueError, match="config.json is a link to .*, outside of the directory"):
        check_file(cache, "config.json")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to("circle")
    for name, message in (
        ("pipe", "pipe is no file"),
        ("device", "is a link to /dev/zero"),
        (".", "is a link|no file"),
    ):
        with pytest.raises(ValueError, match=message):
            check_file(tmp_path, name)
    for name in ("circle", "absent", "a\nb"):
        with pytest.raises(FileNotFoundError, match="has no file"):
            check_file(tmp_path, name)
    check_config_file(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="config.json is no file"):
        check_config_file(tmp_path)


def test_names_of_files_are_shown_escaped(tmp_path):
    (tmp_path / "x\x1b[2J").symlink_to("/etc/hostname")
    with pytest.raises(ValueError) as error:
        check_file(tmp_path, "x\x1b[2J")
    assert r"x\x1b[2J is a link to" in str(error.value)


def test_names_of_tensors_can_be_shown(tmp_path):
    check_names(tmp_path, ["model.layers.0.mlp.up_proj.weight", "größe", ""])
    with pytest.raises(ValueError) as error:
        check_names(tmp_path, ["a", "b\x1b[2J" + "c" * 10**6])
    assert str(error.value).isprintable() and len(str(error.value)) < 500 + len(str(tmp_path))


def test_json_that_is_too_large_or_too_deep(tmp_path, monkeypatch):
    (tmp_path / "a").write_text(json.dumps({"a": json.loads("[" * 90 + "]" * 90)}))
    assert read_json(tmp_path, "a")
    (tmp_path / "a").write_text(json.dumps({"a": json.loads("[" * 200 + "]" * 200)}))
    with pytest.raises(ValueError, match="a is damaged: lists and objects lie in each other more than 100 deep"):
        read_json(tmp_path, "a")
    monkeypatch.setattr(files, "LARGEST", 10)
    with pytest.raises(ValueError, match="a has 407 bytes, more than any such file needs"):
        read_bytes(tmp_path, "a")
