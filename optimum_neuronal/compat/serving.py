"""The programs `transformers serve` and `transformers chat`, run in this process."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


SECONDS = 60  # that a server may take to answer once its model is loaded


def run_transformers(*words: str) -> None:
    """Run transformers' command line on words, as `transformers serve DIR` does. It ends with `SystemExit`.

    A server's thread of continuous batching is stopped: transformers leaves it running, so that Ctrl-C would end no process.
    """
    from transformers.cli.serving import utils
    from transformers.cli.transformers import app

    usual, made = utils.GenerationState, []

    class Recorded(usual):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            made.append(self)

    utils.GenerationState = Recorded
    try:
        app(list(words), prog_name="transformers")
    finally:
        utils.GenerationState = usual
        for state in made:
            state.shutdown()


@contextmanager
def loading_by(load: Callable[..., PreTrainedModel | None]) -> Iterator[None]:
    """Let transformers' server load models by a function while the context lasts.

    The server has no hook for it. It loads as ever with `--quantization`, from GGUF files, and where the function returns None.

    Args:
        load: takes a directory or Hub id and arguments of `from_pretrained`; returns a model, or None.
    """
    from transformers.cli.serving.model_manager import ModelManager

    usual = ModelManager._load_model

    def load_model(
        manager: Any, name: str, *args: Any, gguf_file: str | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        model = None
        if manager.quantization is None and gguf_file is None:
            directory_or_id, _, revision = name.partition("@")
            model = load(
                directory_or_id,
                revision=revision or "main",
                attn_implementation=manager.attn_implementation,
                dtype=manager.dtype,
                device_map=manager.device,
                trust_remote_code=manager.trust_remote_code,
            )
        if model is not None:
            return model
        return usual(manager, name, *args, **kwargs, **({} if gguf_file is None else {"gguf_file": gguf_file}))

    ModelManager._load_model = load_model
    try:
        yield
    finally:
        ModelManager._load_model = usual


@contextmanager
def background_server(model: str, **options: Any) -> Iterator[str]:
    """Run transformers' server of one model in a thread, on a free port of this machine, while the context lasts.

    Args:
        model (`str`): directory or Hub id.
        options: of `transformers serve`, with underscores: `continuous_batching=True`.

    Yields:
        `str`: its address.

    Raises:
        `RuntimeError`: the server does not answer.
    """
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = Serve(force_model=model, host="127.0.0.1", port=port, non_blocking=True, **options)
    try:
        end = time.monotonic() + SECONDS
        while not running.server.started:
            if time.monotonic() > end or not running._thread.is_alive():
                raise RuntimeError(f"The server of {model} did not start on port {port}.")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.kill_server()
