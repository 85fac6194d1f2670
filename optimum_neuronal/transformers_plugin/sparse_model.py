"""Loads sparse models so that they compute with packed weights, and are never in memory dense."""

import os
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..inference.coded_rows import check_activations
from ..model.load_model import load_model
from ..validation import check_path
from .sparse_loading import PackingConfig, is_packed
from .staying_packed import keeping_packed


HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
REFUSED = {
    "quantization_config": (
        "packed weights cannot be quantized. Load a dense checkpoint with AutoModelForCausalLM (`optimum-cli neuronal convert "
        "DIR --format dense --output DENSE_DIR` makes one of a packed one)"
    ),
    "state_dict": "weights are read from files",
    "gguf_file": "GGUF files are quantized",
    "tp_plan": "packed weights cannot be spread over processes",
    "distributed_config": "packed weights cannot be spread over processes",
}


class SparseModelForCausalLM:
    """A sparse language model with packed weights: of the ordinary class, made as optimum's other models are.

    ```python
    model = SparseModelForCausalLM.from_pretrained("me/llama-70")
    model.generate(**tokenizer("Once upon a time", return_tensors="pt"))
    ```
    """

    def __init__(self) -> None:
        raise TypeError(
            "Call SparseModelForCausalLM.from_pretrained(directory_or_id): the model is of its ordinary class."
        )

    @classmethod
    def from_pretrained(
        cls, directory_or_id: str | os.PathLike[str], activations: str = "int8", **kwargs: Any
    ) -> PreTrainedModel:
        """Loads a checkpoint of a sparse model, packed or dense, into what [`sparsify`] makes.

        A packed checkpoint's weights stay packed; a dense one's are packed one after the other as they are read. In
        memory are at most the packed model and one parameter.

        Args:
            directory_or_id (`str` or `Path`): of the checkpoint; one on the Hub is downloaded into the cache.
            activations (`str`):
                What the inputs of projections become whose values are stored with few bits, see [`sparsify`]: `"int8"` or
                `"bf16"`. Others take them as they are.
            kwargs: for transformers' `from_pretrained`: `dtype`, `device_map`, `revision`, `token`, ...

        Returns:
            `PreTrainedModel`: of the class that its config names, such as `LlamaForCausalLM`.

        Raises:
            `ValueError`: damaged, quantized or dense; or it does not fit on the devices; or an argument does not go
                with packed weights.
            `OSError`: there is no such checkpoint.
        """
        check_path("directory_or_id", directory_or_id)
        check_activations(activations)
        for name, why in REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"SparseModelForCausalLM.from_pretrained takes no {name}: {why}.")
        hub = {name: kwargs[name] for name in HUB if name in kwargs}
        config, _ = PreTrainedConfig.get_config_dict(directory_or_id, **hub)
        if is_packed(config):
            with keeping_packed(activations):
                return load_model(directory_or_id, **kwargs)
        return load_model(directory_or_id, quantization_config=PackingConfig(), **kwargs)
