"""Sparse models in transformers' server, which loads them with packed weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.sparsity_config import KEY
from ..checkpoint.stored_format import is_ours
from ..compat import serving
from .sparse_model import SparseModelForCausalLM


def serve(model: str, *flags: str) -> None:
    """Run `transformers serve` for one model until it is interrupted.

    Args:
        model (`str`): directory or Hub id.
        flags: of `transformers serve`.
    """
    with serving.loading_by(load_packed):
        serving.run_transformers("serve", model, *flags)


def chat(model: str, *flags: str) -> None:
    """Run `transformers chat` with a model, which a server in this process computes.

    Args:
        model (`str`): directory or Hub id.
        flags: of `transformers chat`; the first may be the address of a running server, to be used instead.
    """
    if flags and flags[0].startswith(("http://", "https://")):
        return serving.run_transformers("chat", model, *flags)
    with running_server(model) as url:
        serving.run_transformers("chat", model, url, *flags)


@contextmanager
def running_server(model: str, **options: Any) -> Iterator[str]:
    """Run the server of a model in a thread while the context lasts. Yield its address.

    Args:
        model (`str`): directory or Hub id.
        options: of `transformers serve`, with underscores: `continuous_batching=True`.
    """
    with serving.loading_by(load_packed), serving.background_server(model, **options) as url:
        yield url


def load_packed(directory_or_id: str, revision: str, **kwargs: Any) -> PreTrainedModel | None:
    """Load a sparse model with packed weights, as [`SparseModelForCausalLM`] does. Return None for any other model.

    Args:
        directory_or_id (`str`): of the checkpoint, dense or packed.
        revision (`str`): branch, tag or commit on the Hub.
        kwargs: for `from_pretrained`.
    """
    config, _ = PreTrainedConfig.get_config_dict(directory_or_id, revision=revision)
    quantization = config.get("quantization_config")
    if is_ours(quantization) or (config.get(KEY) and quantization is None):
        return SparseModelForCausalLM.from_pretrained(directory_or_id, revision=revision, **kwargs)
    return None
