import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from sparse_checkpoints import all_files, change_config, save_pruned, tensors_of
from transformers import AutoModelForCausalLM

from optimum_neuronal import convert_checkpoint, inspect_checkpoint


def same(one: dict, other: dict) -> bool:
    """The same tensors, to the bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("shard", ["2GB", 20_000])
def test_there_and_back(family, shard, tmp_path, tokenizer):
    """Every tensor to the bit, and every other file; dtypes other than float32 as well."""
    _, model = save_pruned(tmp_path / "dense", family, tokenizer)
    model.bfloat16().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "pytorch_model.bin").write_text("of another tool")
    before = all_files(tmp_path / "dense")
    packed = convert_checkpoint(tmp_path / "dense", "packed", tmp_path / "new" / "packed", shard)
    config = json.loads((packed / "config.json").read_text())
    assert config["sparsity_config"]["format"] == config["quantization_config"]["format"] == "packed"
    assert not list(packed.glob("model*.safetensors*")) and not (packed / "pytorch_model.bin").exists()
    assert not inspect_checkpoint(packed).problems
    again = convert_checkpoint(packed, "dense", tmp_path / "again", shard)
    assert same(tensors_of(tmp_path / "dense"), tensors_of(again))
    if shard != "2GB":
        assert len(list(again.glob("model-*-of-*.safetensors"))) > 2
    reloaded = AutoModelForCausalLM.from_pretrained(again)
    assert same(model.state_dict(), reloaded.state_dict())
    after = all_files(again)
    unchanged = {"generation_config.json", "neuronal_report.json", "tokenizer.json", "README.md"} & before.keys()
    assert len(unchanged) == 4 and all(before[name] == after[name] for name in unchanged)
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])
    assert all_files(tmp_path / "dense") == before, "what is converted is only read"


def test_in_place(tmp_path):
    save_pruned(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    before, dense = all_files(tmp_path / "model"), tensors_of(tmp_path / "model")
    convert_checkpoint(tmp_path / "model", "packed")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "model.safetensors" not in names and "packed-00001-of-00001.safetensors" in names
    assert {"notes.txt", "generation_config.json"} <= names
    card = (tmp_path / "model" / "README.md").read_text()
    assert "import optimum_neuronal" in card and "neuronal convert model --format dense" in card
    convert_checkpoint(tmp_path / "model", "dense")
    after = all_files(tmp_path / "model")
    assert same(tensors_of(tmp_path / "model"), dense) and after.keys() == before.keys()
    assert after["README.md"] == before["README.md"] and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_card_of_another_make_stays(tmp_path):
    save_pruned(tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("# My model\n\n## Use\n\nAs you like.\n")
    convert_checkpoint(tmp_path / "model", "packed")
    assert (tmp_path / "model" / "README.md").read_text() == "# My model\n\n## Use\n\nAs you like.\n"


def test_a_card_in_another_encoding_stays(tmp_path):
    save_pruned(tmp_path / "model")
    card = "# Modèle\n\n## Use\n\nx\n\n## Sparsity\n".encode("latin-1")
    (tmp_path / "model" / "README.md").write_bytes(card)
    assert (convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new") / "README.md").read_bytes() == card
    assert (convert_checkpoint(tmp_path / "model", "packed") / "README.md").read_bytes() == card


def test_a_directory_with_a_space(tmp_path):
    """The card tells how to use the new format, in a line that a shell takes for what it is."""
    save_pruned(tmp_path / "my model")
    before = (tmp_path / "my model" / "README.md").read_bytes()
    card = (convert_checkpoint(tmp_path / "my model", "packed") / "README.md").read_text()
    assert "import optimum_neuronal\n" in card and 'from_pretrained("my model")' in card
    assert "neuronal convert 'my model' --format dense --output 'my model-dense'" in card
    assert (convert_checkpoint(tmp_path / "my model", "dense") / "README.md").read_bytes() == before


def test_a_tokenizers_folder_out_of_the_hubs_cache(tmp_path):
    """Its files come along, not the links to them; and nothing that lies elsewhere."""
    save_pruned(tmp_path / "model")
    blobs, commit = tmp_path / "models--me--llama" / "blobs", tmp_path / "models--me--llama" / "snapshots" / "c0"
    (commit / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "model").iterdir():
        file.rename(blobs / file.name)
        (commit / file.name).symlink_to(f"../../blobs/{file.name}")
    (blobs / "template").write_text("{{ messages }}")
    (commit / "additional_chat_templates" / "tool.jinja").symlink_to("../../../blobs/template")
    packed = convert_checkpoint(commit, "packed", tmp_path / "packed")
    assert not inspect_checkpoint(packed).problems and not any(path.is_symlink() for path in packed.rglob("*"))
    assert (packed / "additional_chat_templates" / "tool.jinja").read_text() == "{{ messages }}"
    (commit / "additional_chat_templates" / "other.jinja").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match="additional_chat_templates/other.jinja is a link to /etc/hostname"):
        convert_checkpoint(commit, "packed", tmp_path / "again")


@pytest.mark.parametrize(
    "change, arguments, message",
    [
        (None, ("dense",), "is dense already"),
        (None, ("sparse",), "format is 'sparse': expected one of 'dense', 'packed'"),
        (None, ("packed", None, "many"), "max_shard_size is 'many': expected bytes, or text such as '500MB'"),
        (None, ("packed", None, 0), "max_shard_size is 0: expected bytes"),
        (lambda config: config.pop("sparsity_config"), ("packed",), "is not pruned .* prune it first"),
        (lambda config: config["sparsity_config"].update(version=7), ("packed",), "config.json: .*version is 7: this"),
        (
            lambda config: config["sparsity_config"].update(format="packed"),
            ("dense",),
            "config.json contradicts itself: sparsity_config.format is 'packed', but",
        ),
    ],
)
def test_what_cannot_be_converted(change, arguments, message, tmp_path):
    save_pruned(tmp_path)
    if change:
        change_config(tmp_path, change)
    before = all_files(tmp_path)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path, *arguments)
    assert all_files(tmp_path) == before


def test_a_damaged_weight_changes_nothing(tmp_path):
    save_pruned(tmp_path / "model")
    convert_checkpoint(tmp_path / "model", "packed")
    file = tmp_path / "model" / "packed-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    before = all_files(tmp_path)
    with pytest.raises(ValueError, match="is damaged"):
        convert_checkpoint(tmp_path / "model", "dense")
    with pytest.raises(ValueError, match="is damaged"):
        convert_checkpoint(tmp_path / "model", "dense", tmp_path / "new")
    assert all_files(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_disk_that_fills_up(tmp_path, monkeypatch):
    save_pruned(tmp_path / "model")
    before = all_files(tmp_path)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("optimum_neuronal.checkpoint.weight_writers.save_file", full)
        for output in (None, tmp_path / "new"):
            with pytest.raises(OSError, match="failed, and its files are as they were: .*No space left"):
                convert_checkpoint(tmp_path / "model", "packed", output)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("", (), {"free": 10}))
    with pytest.raises(OSError, match="needs 0.0 MB, and 0.0 MB are free"):
        convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new")
    assert all_files(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_links_out_of_the_directory_do_not_come_along(tmp_path):
    save_pruned(tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "model" / "merges.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="merges.txt is a link to .*secret, outside of the directory"):
        convert_checkpoint(tmp_path / "model", "packed", tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Prints how much private memory each conversion of a directory takes at most.
CONVERT = """
import sys, threading
from pathlib import Path
from optimum_neuronal import convert_checkpoint

def private_memory():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024

peaks, stop = [0], threading.Event()

def watch():
    while not stop.wait(0.001):
        peaks[-1] = max(peaks[-1], private_memory())

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
before = []
for format in ("packed", "dense"):
    before.append(private_memory())
    peaks.append(before[-1])
    convert_checkpoint(sys.argv[1], format, max_shard_size=4_000_000)
stop.set()
watcher.join()
print(max(peak - start for peak, start in zip(peaks[1:], before)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_memory_is_a_shard_and_a_weight(tmp_path):
    """Of a model of 96 MB, never a quarter; what files are mapped to is not counted, since it needs no room.

    In a process of its own, whose C library hands freed memory back at once: other tests leave theirs behind.
    """
    save_pruned(tmp_path / "model")
    change_config(tmp_path / "model", lambda config: config.update(model_type="of large layers"))
    weight = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    weight[:, ::3] = torch.randn(1024, 683).bfloat16()
    save_file(
        {f"layer{index}.weight": weight.clone() for index in range(24)}, tmp_path / "model" / "model.safetensors"
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CONVERT, tmp_path / "model"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) < 24e6, result.stdout
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) == 24


def test_a_directory_of_the_hubs_cache_stays_as_it_is(tmp_path):
    """Its files are links to blobs, and the same blobs may belong to other revisions."""
    snapshot, blobs = tmp_path / "models--me--m" / "snapshots" / "abc", tmp_path / "models--me--m" / "blobs"
    save_pruned(snapshot)
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert not inspect_checkpoint(snapshot).problems
    with pytest.raises(ValueError, match="are links, as in the Hub's cache: name another output"):
        convert_checkpoint(snapshot, "packed")
    packed = convert_checkpoint(snapshot, "packed", tmp_path / "packed")
    assert not inspect_checkpoint(packed).problems and not any(path.is_symlink() for path in packed.iterdir())
