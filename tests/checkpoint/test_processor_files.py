import json

import pytest
from conftest import make_tokenizer
from kinds import make_kind

from optimum_neuronal.checkpoint.packed_files import source_files
from optimum_neuronal.checkpoint.saving import copy_processor
from optimum_neuronal.model.load_model import load_model
from optimum_neuronal.model.origin import own_tokenizer


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


def test_a_link_out_of_the_checkpoint_is_not_followed(llava, tmp_path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "dense" / "preprocessor_config.json").unlink()
    (tmp_path / "dense" / "preprocessor_config.json").symlink_to(tmp_path / "secret")
    copy_processor(llava, tmp_path / "saved")
    assert not (tmp_path / "saved" / "preprocessor_config.json").exists()


def test_files_and_tokenizer_come_from_the_models_own_revision(tmp_path):
    repository = tmp_path / "models--me--llava"
    for branch in ("main", "trial"):
        snapshot = repository / "snapshots" / branch
        make_kind("LlavaForConditionalGeneration").save_pretrained(snapshot)
        make_tokenizer(eos_token="w1" if branch == "main" else "w2").save_pretrained(snapshot)
        (snapshot / "preprocessor_config.json").write_text(json.dumps({"branch": branch}))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(branch)
    (tmp_path / "saved").mkdir()
    model = load_model("me/llava", revision="trial", cache_dir=tmp_path, local_files_only=True)
    copy_processor(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text()) == {"branch": "trial"}
    assert source_files(model) == [repository / "snapshots" / "trial" / "model.safetensors"]
    assert own_tokenizer(model).eos_token == "w2"
