"""Loads sparse models that compute with packed weights, and are never in memory dense.

Of a packed checkpoint transformers reads files whose weights look dense and are [`PackedTensor`]s, of a dense one the
files themselves. In both cases a weight is packed when it is set on its module, see `inference.arriving`.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.packed_reading import PackedFile
from ..checkpoint.safe_files import check_listed, check_model_files
from ..checkpoint.sparsity_config import read_sparsity_config
from ..checkpoint.stored_format import check_agreement, is_ours
from ..checkpoint.stored_weights import StoredWeight
from ..common.validation import check_path
from ..compat import hf_private
from ..model.load_model import load_model
from ..packed.arriving import finish_arriving, pack_arriving
from ..packed.formats.packed_matrix import DTYPES as COMPUTED
from ..packed.packed_tensor import PackedTensor
from .packed_loading import PackedConfig, PackedQuantizer, keeping_packed, keeps_sparse


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
    def from_pretrained(cls, directory_or_id: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
        """Load a checkpoint of a sparse model, packed or dense, with packed weights, as [`sparsify`] makes them.

        A packed checkpoint's weights stay packed; a dense one's are packed one after the other as they are read. In
        memory are at most the packed model and one parameter.

        Args:
            directory_or_id (`str` or `Path`): of the checkpoint; one on the Hub is downloaded into the cache.
            kwargs: for transformers' `from_pretrained`: `dtype`, `device_map`, `revision`, `token`, ...

        Returns:
            `PreTrainedModel`: of the class that its config names, such as `LlamaForCausalLM`.

        Raises:
            `ValueError`: damaged, quantized or dense; or it does not fit on the devices; or an argument is refused
                for packed weights.
            `OSError`: there is no such checkpoint.
        """
        check_path("directory_or_id", directory_or_id)
        for name, why in REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"SparseModelForCausalLM.from_pretrained takes no {name}: {why}.")
        check_model_files(directory_or_id, kwargs)
        hub = {name: kwargs[name] for name in HUB if name in kwargs}
        config, _ = PreTrainedConfig.get_config_dict(directory_or_id, **hub)
        if _is_packed(config):
            with keeping_packed():
                return load_model(directory_or_id, **kwargs)
        return load_model(directory_or_id, quantization_config=PackingConfig(), **kwargs)


def _is_packed(config: dict[str, Any]) -> bool:
    """Return True for the config.json of a packed checkpoint; raise `ValueError` for that of a quantized model."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    if not is_ours(quantization):
        raise ValueError(
            "The checkpoint is quantized: only floating-point weights can be packed. Load it with AutoModelForCausalLM."
        )
    PackedConfig.from_dict(quantization)
    return True


class _KeptWeight:
    """A packed weight in a file; indexing reads and checks it, and leaves it packed."""

    def __init__(self, stored: StoredWeight):
        self.stored = stored
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        weight = PackedTensor.of(self.stored.read_packed(), self.stored.transposed)
        return weight if index is Ellipsis else weight[index]


class _IntoPacked(hf_private.EarlyQuantizer):
    """A quantizer that packs weights as they are read, reports their packed size, and refuses to offload them."""

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # else transformers reads ahead without bound

    def validate_environment(self, device_map: Any = None, **_: Any) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "Some weights would be offloaded (device_map), but packed weights have to be in memory: choose another "
                "device_map, or max_memory with room for all; or make the checkpoint dense, with `optimum-cli neuronal convert "
                "DIR --format dense --output DENSE_DIR`, and load DENSE_DIR with AutoModelForCausalLM."
            )

    def pack(self, model: PreTrainedModel, bits: Mapping[str, float], usual: float, sparse: bool = True) -> None:
        """Let a model's weights be packed as they come.

        Args:
            model (`PreTrainedModel`): without weights.
            bits (`Mapping[str, float]`): that an element of a weight takes, by the parameter's name.
            usual (`float`): that an element of the other weights that may be packed takes, in bits.
            sparse (`bool`): False: only quantised weights stay packed.
        """
        self._bytes = {name: bits.get(name, usual) / 8 for name in pack_arriving(model, sparse)}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        return min(param.element_size(), self._bytes.get(param_name, param.element_size()))


class KeepingQuantizer(_IntoPacked, PackedQuantizer):
    """A quantizer that loads a packed checkpoint into packed modules: its quantised weights, or all."""

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self._sparse = keeps_sparse()

    def readers(self, model: PreTrainedModel, files: list[PackedFile]) -> list[PackedFile]:
        """Return files whose packed weights are read as [`PackedTensor`]s."""
        packed = [
            w
            for file in files
            for w in file.weights.values()
            if w.is_packed and (self._sparse or w.code_bits is not None)
        ]
        bits = {weight.name: 8 * weight.stored_bytes / max(1, weight.numel) for weight in packed}
        inner = [weight for weight in packed if len(weight.shape) >= 2]
        usual = 8 * sum(w.stored_bytes for w in inner) / max(1, sum(w.numel for w in inner))
        self.pack(model, bits, usual if self._sparse else math.inf, self._sparse)
        kept = {weight.name: _KeptWeight(weight) for weight in packed if weight.dtype in COMPUTED}
        return [
            PackedFile(file.path, {name: kept.get(name, weight) for name, weight in file.weights.items()})
            for file in files
        ]

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        super().postprocess_model(model, **kwargs)
        finish_arriving(model, self._sparse)
        return model


class PackingConfig(QuantizationConfigMixin):
    """The `quantization_config` with which a dense checkpoint is loaded into packed modules."""

    def __init__(self) -> None:
        super().__init__(quant_method="neuronal")  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "neuronal"}


class PackingQuantizer(_IntoPacked):
    """A quantizer that loads a dense checkpoint of a sparse model into packed modules."""

    def see_config(self, config: PreTrainedConfig) -> None:
        """Raise for a packed checkpoint; sparse and dense models are packed alike."""
        check_agreement(read_sparsity_config(config), "dense")

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any) -> None:
        check_listed(checkpoint_files or ())
        hf_private.forget_quantization(model)
        sparsity_config = read_sparsity_config(model.config) or {"achieved_sparsity": 0.0}
        dtype = model.dtype if model.dtype in COMPUTED else torch.float32
        self.pack(model, {}, 1 + 8 * dtype.itemsize * (1 - sparsity_config["achieved_sparsity"]))

    def postprocess_model(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        hf_private.forget_quantization(model)
        finish_arriving(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # by adapters; packed weights themselves refuse it
