import json
import logging

import pytest
from kinds import make_kind

from optimum_neuronal.checkpoint.saving import copy_processor
from optimum_neuronal.model.load_model import load_model


FILES = {"preprocessor_config.json": {"size": 16}, "processor_config.json": {"image_seq_length": 4}}


@pytest.fixture
def llava(tmp_path):
    make_kind("LlavaForConditionalGeneration").save_pretrained(tmp_path / "dense")
    for name, content in FILES.items():
        (tmp_path / "dense" / name).write_text(json.dumps(content))
    (tmp_path / "saved").mkdir()
    return load_model(tmp_path / "dense")


def test_the_processor_of_a_multimodal_model_goes_along(llava, tmp_path):
    (tmp_path / "saved" / "processor_config.json").write_text("the caller's own")
    copy_processor(llava, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text()) == {"size": 16}
    assert (tmp_path / "saved" / "processor_config.json").read_text() == "the caller's own"
    assert len(list((tmp_path / "saved").iterdir())) == 2


def test_of_a_text_model_nothing_is_looked_for(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("optimum_neuronal.compat.hf_private.find_file", None)
    llama.config.name_or_path = "me/llama"
    copy_processor(llama, tmp_path)
    made = make_kind("LlavaForConditionalGeneration")  # of no checkpoint
    copy_processor(made, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_had_is_told(llava, tmp_path, caplog):
    (tmp_path / "dense" / "preprocessor_config.json").unlink()
    (tmp_path / "secret").write_text("of this machine")
    (tmp_path / "dense" / "preprocessor_config.json").symlink_to(tmp_path / "secret")
    copy_processor(llava, tmp_path / "saved")
    notes = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(notes) == 1 and "preprocessor_config.json of the model's processor could not be read" in notes[0]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["processor_config.json"]
