import json

import pytest

from optimum_neuronal.data import sample_text as module
from optimum_neuronal.model.load_model import load_model


def test_sample_prune(run, dense, tmp_path):
    output = tmp_path / "own.jsonl"
    shown = run("sample", "--model", dense, "--num-samples", 40, "--max-length", 24, "--output", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert shown == f"Wrote {len(rows)} documents to {output}. Use it as --dataset {output}.\n"
    assert all(row.keys() == {"text"} for row in rows) and not [*tmp_path.glob(".own*")]
    sizes = ("--num-samples", 4, "--seq-length", 8)
    method = ("--sparsity", 0.5, "--saliency", "wanda", "--topup", "uniform")
    run("prune", "--model", dense, *method, "--dataset", output, *sizes, "--output", tmp_path / "m")
    report = json.loads((tmp_path / "m" / "neuronal_report.json").read_text())
    assert report["calibration"]["source"] == "own.jsonl"


def test_an_interrupt_says_how_to_go_on(run, dense, tmp_path, monkeypatch, capsys):
    output, write = tmp_path / "own.jsonl", module.Writer.write
    given = ("sample", "--model", dense, "--num-samples", 40, "--max-length", 24, "--output", output)
    counts = []

    def interrupted(self, count):
        counts.append(count)
        if len(counts) == 2:
            raise KeyboardInterrupt
        return write(self, count)

    monkeypatch.setattr(module.Writer, "write", interrupted)
    with pytest.raises(SystemExit) as end:
        run(*given)
    assert end.value.code == 130 and not output.exists()
    assert (
        f"the same command continues; to start over, delete {tmp_path / '.own.jsonl.unfinished'}"
        in capsys.readouterr().err
    )
    template = dense / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")  # conversations would follow documents in one file
    with pytest.raises(SystemExit, match="started with different settings: chat template was"):
        run(*given)
    template.unlink()
    weights = (dense / "model.safetensors").read_bytes()
    other = load_model(dense)
    other.model.norm.weight.data += 1
    other.save_pretrained(dense)  # in the same place
    with pytest.raises(SystemExit, match="started with different settings: model was"):
        run(*given)
    (dense / "model.safetensors").write_bytes(weights)
    run(*given)
    assert counts == [32, 8, 8] and output.exists()


@pytest.mark.parametrize(
    "given, message",
    [
        (("--output", "own.txt"), "--output is own.txt: expected a file whose name ends in .jsonl"),
        (("--output", "own.jsonl", "--temperature", 0), "temperature is 0"),
        (("--output", "taken.jsonl"), "taken.jsonl exists"),
        (("--output", "own.jsonl", "--max-length", 10**6), "do not fit"),
    ],
)
def test_bad_arguments(given, message, run, dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").touch()
    with pytest.raises(SystemExit, match=message):
        run("sample", "--model", dense, *given)
    assert (tmp_path / "taken.jsonl").read_text() == ""
