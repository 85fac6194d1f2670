"""Without a connection; with one, see test_publishing."""

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from optimum_neuronal.checkpoint.hub import HTTPError, check_push, find_checkpoint


def test_a_hub_that_cannot_be_reached(monkeypatch):
    """Whatever the library under the Hub's client raises, it is one sentence."""
    for failure in (HTTPError("[Errno 111] Connection refused"), OfflineModeIsEnabled("offline")):

        def fail(self, failure=failure):
            raise failure

        monkeypatch.setattr(HfApi, "whoami", fail)
        with pytest.raises(
            ConnectionError, match="'me/llama' cannot be published, because the Hub cannot be reached: "
        ):
            check_push("me/llama")
    assert issubclass(HfHubHTTPError, HTTPError) and HTTPError is not OSError


def test_a_file_is_not_looked_up_on_the_hub(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(NotADirectoryError, match="model.gguf is a file: name the directory of a model, or its id"):
        find_checkpoint(tmp_path / "model.gguf")
