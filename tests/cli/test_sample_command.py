import json

import pytest
from obstacles import OBSTACLES, state

from optimum_neuronal.data import sample_text as module
from optimum_neuronal.model.load_model import load_model


def test_sample_prune(run, dense, tmp_path):
    output = tmp_path / "own.jsonl"
    shown = run("sample", "--model", dense, "--num-samples", 40, "--max-new-tokens", 24, "--output", output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert shown == f"Wrote {len(rows)} documents to {output}. Use it as --dataset {output}.\n"
    assert all(row.keys() == {"text"} for row in rows) and not [*tmp_path.glob(".own*")]
    (tmp_path / "prompts.txt").write_text("w7 w8\nw9\n")
    answers = tmp_path / "answers.jsonl"
    given = ("--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 8, "--output", answers)
    assert run("sample", "--model", dense, *given).startswith("Wrote 2 documents to")
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    assert texts[0].startswith("w7 w8 w") and texts[1].startswith("w9 w")
    sizes = ("--num-samples", 4, "--seq-length", 8)
    method = ("--sparsity", 0.5, "--saliency", "wanda", "--topup", "uniform")
    run("prune", "--model", dense, *method, "--dataset", output, *sizes, "--output", tmp_path / "m")
    report = json.loads((tmp_path / "m" / "neuronal_report.json").read_text())
    assert report["calibration"]["source"] == "own.jsonl"


def test_an_interrupt_says_how_to_go_on(run, dense, tmp_path, monkeypatch, capsys):
    output, write = tmp_path / "own.jsonl", module.Writer.write
    given = ("sample", "--model", dense, "--num-samples", 40, "--max-new-tokens", 24, "--output", output)
    run(*given[:-1], tmp_path / "undisturbed.jsonl")
    counts = []

    def interrupted(self, numbers):
        counts.append(len(numbers))
        if len(counts) == 2:
            raise KeyboardInterrupt
        return write(self, numbers)

    monkeypatch.setattr(module.Writer, "write", interrupted)
    with pytest.raises(SystemExit) as end:
        run(*given)
    assert end.value.code == 130 and not output.exists()
    shown = capsys.readouterr().err
    assert f"the same command resumes from here; to start over, delete {tmp_path / '.own.jsonl.unfinished'}" in shown
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
    assert counts == [32, 8, 8] and output.read_text() == (tmp_path / "undisturbed.jsonl").read_text()


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_lies_at_the_output_or_appears_there_meanwhile_stays(kind, run, dense, tmp_path, monkeypatch):
    output, write = tmp_path / "own.jsonl", module.Writer.write
    given = ("sample", "--model", dense, "--num-samples", 4, "--max-new-tokens", 24, "--output", output)

    def meanwhile(self, numbers):
        OBSTACLES[kind](output)
        return write(self, numbers)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="File exists"):
        patch.setattr(module.Writer, "write", meanwhile)
        run(*given)
    before = state(output)
    with pytest.raises(SystemExit, match="own.jsonl exists: choose another --output, or delete it"):
        run(*given)
    assert state(output) == before
    output.rename(tmp_path / "other")
    monkeypatch.setattr(module.Writer, "write", lambda *_: pytest.fail("written again"))
    run(*given)
    assert len(output.read_text().splitlines()) == 4 and not [*tmp_path.glob(".own*")]
