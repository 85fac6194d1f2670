import json

from conftest import make_tokenizer
from kinds import make_kind
from sparse_checkpoints import all_files

from optimum_neuronal.checkpoint.packed_files import source_files
from optimum_neuronal.checkpoint.saving import copy_processor
from optimum_neuronal.model.load_model import load_model
from optimum_neuronal.model.origin import own_tokenizer


def test_the_processor_of_a_multimodal_model_goes_along(tmp_path):
    """But not the target of a link out of the checkpoint."""
    dense, saved = tmp_path / "dense", tmp_path / "saved"
    make_kind("LlavaForConditionalGeneration").save_pretrained(dense)
    (dense / "preprocessor_config.json").write_text('{"size": 16}')
    (dense / "processor_config.json").write_text("the checkpoint's")
    (tmp_path / "secret").write_text("mine")
    (dense / "video_preprocessor_config.json").symlink_to(tmp_path / "secret")
    saved.mkdir()
    (saved / "processor_config.json").write_text("the caller's own")
    copy_processor(load_model(dense), saved)
    assert all_files(saved) == {
        "preprocessor_config.json": b'{"size": 16}', "processor_config.json": b"the caller's own"
    }  # fmt: skip


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
