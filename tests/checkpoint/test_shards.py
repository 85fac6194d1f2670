import json

import pytest
import torch
from safetensors import safe_open

from optimum_neuronal.checkpoint.shards import ShardWriter


class Writer(ShardWriter):
    def finish(self, count, index):
        (self.folder / "index.json").write_text(json.dumps(index))


def tensors(*names):
    return {name: torch.ones(10) for name in names}  # 40 bytes each


def test_what_is_taken_together_lies_in_one_file(tmp_path):
    with Writer(tmp_path, 100, "some") as writer:
        for names in ("a", "bc", "d", "e"):  # b and c do not fit beside a, d does not fit beside them
            writer.take(tensors(*names))
    index = json.loads((tmp_path / "index.json").read_text())
    files = {name: f"some-{number:05}-of-00003.safetensors" for name, number in zip("abcde", (1, 2, 2, 3, 3))}
    assert index == {"metadata": {"total_size": 200}, "weight_map": files}
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", *files.values()}
    with safe_open(tmp_path / files["b"], framework="pt") as file:
        assert set(file.keys()) == {"b", "c"} and file.metadata() == {"format": "pt"}


def test_an_error_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), Writer(tmp_path, 50, "some") as writer:
        writer.take(tensors("a"))
        writer.take(tensors("b"))
        assert list(tmp_path.iterdir()), "a is written"
        raise RuntimeError("stop")
    assert not list(tmp_path.iterdir())
