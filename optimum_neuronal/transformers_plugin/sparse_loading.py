"""What transformers' `from_pretrained` calls for `SparseModelForCausalLM`: weights are packed, or stay so, as they are read.

Of a packed checkpoint transformers is given files whose weights look dense and are [`PackedTensor`]s; of a dense one its
own. In both cases a weight is packed when it is set on its module, one after the other, see `inference.arriving`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoint.coded_reading import StoredCodedWeight
from ..checkpoint.dense_index import check_dense, check_listed
from ..checkpoint.int8_reading import StoredInt8Weight
from ..checkpoint.packed_reading import AnyStored, PackedFile
from ..checkpoint.sparsity_config import read_sparsity_config
from ..checkpoint.stored_format import check_agreement, is_ours
from ..compat import transformers as internals
from ..inference.arriving import finish_arriving, pack_arriving
from ..inference.packed_rows import DTYPES as COMPUTED
from ..inference.packed_tensor import PackedTensor
from .packed_loading import PackedConfig, PackedQuantizer
from .staying_packed import kept_activations


class KeptFile:
    """A packed file whose packed weights are read as [`PackedTensor`]s.

    Args:
        file ([`PackedFile`]): as its header was checked.
        activations (`str`): what inputs become that meet values of few bits.
    """

    def __init__(self, file: PackedFile, activations: str):
        self.file, self.path, self.activations = file, file.path, activations
        self.keys, self.metadata = file.keys, file.metadata

    def get_slice(self, name: str) -> "KeptWeight | AnyStored":
        """A weight that is read when it is indexed."""
        weight = self.file.get_slice(name)
        computed = weight.kept is not None and weight.dtype in COMPUTED
        return KeptWeight(weight, self.activations) if computed else weight

    def get_tensor(self, name: str) -> torch.Tensor:
        """A weight, on the CPU."""
        return self.get_slice(name)[...]

    def __enter__(self) -> "KeptFile":
        return self

    def __exit__(self, *_) -> None:
        """Nothing is left open between two reads."""


class KeptWeight:
    """A packed weight in a file; indexing reads and checks it.

    Args:
        stored ([`StoredWeight`], [`StoredCodedWeight`] or [`StoredInt8Weight`]): where it lies.
        activations (`str`): what inputs become that meet values of few bits.
    """

    def __init__(self, stored: AnyStored, activations: str):
        self.stored, self.activations = stored, activations
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, index) -> torch.Tensor:
        if isinstance(self.stored, StoredInt8Weight):
            weight = PackedTensor.of(self.stored.read_int8(), activations=self.activations)
        elif isinstance(self.stored, StoredCodedWeight):
            weight = PackedTensor.of(self.stored.read_coded(), self.stored.transposed, self.activations)
        else:
            weight = PackedTensor.of(self.stored.read_packed())
        return weight if index is Ellipsis else weight[index]


class _IntoPacked(internals.EarlyQuantizer):
    """Has what is read be packed, tells its size to whoever spreads it over devices, and refuses to offload it."""

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = False  # else transformers reads ahead without bound

    def validate_environment(self, device_map: Any = None, **_) -> None:
        places = {str(place) for place in device_map.values()} if isinstance(device_map, dict) else set()
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ValueError(
                "Some weights would be offloaded (device_map), but packed weights have to be in memory: choose another "
                "device_map, or max_memory with room for all, or load the model with AutoModelForCausalLM."
            )

    def pack(self, model: PreTrainedModel, kept: Mapping[str, float], usual: float) -> None:
        """Has a model's weights be packed as they come.

        Args:
            model (`PreTrainedModel`): without weights.
            kept (`Mapping[str, float]`): share of a weight's elements that will be kept, by the parameter's name.
            usual (`float`): the same of weights that are not named.
        """
        self._kept = {name: kept.get(name, usual) for name in pack_arriving(model)}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        size = param.element_size()
        return min(size, self._kept[param_name] * size + 1 / 8) if param_name in self._kept else size


class KeepingQuantizer(_IntoPacked, PackedQuantizer):
    """Loads a packed checkpoint into packed modules."""

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str], **kwargs) -> None:
        super().preprocess_model(model, checkpoint_files, **kwargs)
        self.pack(model, self._shares, self._usual)

    def readers(self, files: list[PackedFile]) -> list[KeptFile]:
        stored = [weight for file in files for weight in file.weights.values()]
        packed = [w for w in stored if w.kept is not None and not isinstance(w, StoredInt8Weight)]
        sizes = {weight.name: (weight.kept, math.prod(weight.shape)) for weight in packed}
        self._shares = {name: kept / max(1, numel) for name, (kept, numel) in sizes.items()}
        self._shares |= {w.name: 1 / w.dtype.itemsize for w in stored if isinstance(w, StoredInt8Weight)}
        self._usual = sum(kept for kept, _ in sizes.values()) / max(1, sum(numel for _, numel in sizes.values()))
        activations = kept_activations()
        return [KeptFile(file, activations) for file in files]

    def postprocess_model(self, model: PreTrainedModel, **kwargs) -> PreTrainedModel:
        super().postprocess_model(model, **kwargs)
        finish_arriving(model)
        return model


class PackingConfig(QuantizationConfigMixin):
    """The `quantization_config` with which a dense checkpoint is loaded into packed modules."""

    def __init__(self):
        super().__init__(quant_method="neuronal")

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": "neuronal"}


class PackingQuantizer(_IntoPacked):
    """Loads a dense checkpoint of a sparse model into packed modules."""

    def see_config(self, config: PreTrainedConfig) -> None:
        """Any will do: whether the model is sparse its weights tell."""
        check_agreement(read_sparsity_config(config), "dense")
        check_dense(config.name_or_path)

    def preprocess_model(self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_) -> None:
        check_listed(checkpoint_files or ())
        internals.forget_quantization(model)
        sparsity_config = read_sparsity_config(model.config) or {"achieved_sparsity": 0.0}
        self.pack(model, {}, 1 - sparsity_config["achieved_sparsity"])

    def postprocess_model(self, model: PreTrainedModel, **_) -> PreTrainedModel:
        internals.forget_quantization(model)
        finish_arriving(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def is_packed(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a packed checkpoint. Raises `ValueError` if it is that of a quantized model."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    if not is_ours(quantization):
        raise ValueError(
            "The checkpoint is quantized: only floating-point weights can be packed. Load it with AutoModelForCausalLM."
        )
    PackedConfig.from_dict(quantization)
    return True
