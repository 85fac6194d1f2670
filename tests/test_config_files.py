import json

import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config_files import read_config_file


FIELDS = {"sparsity": 0.7, "topup": "owl", "topup_args": {"half_width": 0.1}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.json", json.dumps(FIELDS)),
        ("recipe.yaml", "sparsity: 0.7\ntopup: owl\ntopup_args:\n  half_width: 0.1\n"),
        ("neuronal_report.json", json.dumps({"config": FIELDS, "achieved_sparsity": 0.7})),
    ],
)
def test_fields_are_read(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_config_file(tmp_path / name) == FIELDS
    assert NeuronALConfig.from_json_file(tmp_path / name) == NeuronALConfig(**FIELDS)


def test_what_is_written_is_read(tmp_path):
    config = NeuronALConfig(sparsity=0.6, effort="best", ignore=["q_proj"])
    config.to_json_file(tmp_path / "config.json")
    assert NeuronALConfig.from_json_file(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "a.json cannot be read"),
        ("a.yaml", b"sparsity: [", "a.yaml cannot be read"),
        ("a.json", b"\xff", "a.json cannot be read"),
        ("a.yaml", b"!!python/object/apply:os.getcwd []", "a.yaml cannot be read"),
        ("a.yaml", b"0.7", "holds no fields"),
        ("a.yaml", b"1: 2", "holds no fields"),
        ("a.json", b'{"sparsty": 0.7}', "Did you mean 'sparsity'"),
    ],
)
def test_files_that_are_no_recipes(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        NeuronALConfig.from_json_file(tmp_path / name)
