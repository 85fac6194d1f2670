from types import SimpleNamespace

import pytest
from transformers.cli import transformers as transformers_cli
from transformers.cli.serving import utils
from transformers.cli.serving.model_manager import ModelManager

from optimum_neuronal.compat.serving import loading_by, run_transformers


def test_transformers_own_command_line_runs(capsys):
    with pytest.raises(SystemExit) as stop:
        run_transformers("serve", "--no-such-flag")
    assert stop.value.code == 2 and "--no-such-flag" in capsys.readouterr().err


def test_threads_of_a_server_are_stopped_when_it_ends(monkeypatch):
    usual, stopped = utils.GenerationState, []
    monkeypatch.setattr(usual, "shutdown", lambda state: stopped.append(state))
    monkeypatch.setattr(transformers_cli, "app", lambda *_, **__: utils.GenerationState(continuous_batching=True))
    run_transformers("serve", "model")
    assert len(stopped) == 1 and isinstance(stopped[0], usual) and utils.GenerationState is usual


def test_models_are_loaded_by_the_function_where_it_takes_them(monkeypatch):
    usual = []
    monkeypatch.setattr(ModelManager, "_load_model", lambda *args, **kwargs: usual.append(kwargs) or "usual")
    before, seen = ModelManager._load_model, []
    given = {"attn_implementation": "sdpa", "dtype": "auto", "trust_remote_code": False}
    manager = SimpleNamespace(quantization=None, device="cpu", **given)

    def load(name, **kwargs):
        seen.append((name, kwargs))
        return "packed" if name == "sparse" else None

    with loading_by(load):
        assert ModelManager._load_model(manager, "sparse@v2", tqdm_class=None) == "packed" and not usual
        assert seen == [("sparse", {"revision": "v2", "device_map": "cpu", **given})]
        assert ModelManager._load_model(manager, "dense@main", tqdm_class=None) == "usual"
        assert ModelManager._load_model(manager, "sparse@main", gguf_file="sparse.gguf") == "usual"
        manager.quantization = "bnb-4bit"
        assert ModelManager._load_model(manager, "sparse@main") == "usual"
    assert usual == [{"tqdm_class": None}, {"gguf_file": "sparse.gguf"}, {}] and ModelManager._load_model is before
