"""`NeuronALConfig`: everything that decides how a model is pruned."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..common.registry import parse_method
from ..common.validation import (
    check_choice,
    check_count,
    check_embedding_bits,
    check_flag,
    check_number,
    check_path,
    check_sparsity,
    check_texts,
    closest_or_all,
    make_checked,
)
from ..rotation.learning import Rotation
from ..saliency import SALIENCIES
from ..saliency.low_bit import LowBit
from ..saliency.plan import ColumnPattern
from ..topup import TOPUPS
from ..topup.rates import Rates
from .config_fields import ConfigFields, arguments, as_json
from .methods import RECONSTRUCT, Methods
from .presets import PRESETS


FEWEST = 16  # calibration sequences for a refit, which holds some out
LEAST_BITS, MOST_BITS = 2, 9  # per weight: fewer than the fewest codes take; more than the most and their scales
# Fields that only a prune to zeros uses. A prune that quantizes requires their defaults.
OF_ZEROS = (
    "saliency",
    "saliency_args",
    "topup_args",
    "pattern",
    "reconstruct",
    "refit_epochs",
    "rotate",
    "rotate_args",
)

# Type checkers would make `quant_method`, a field there and a class attribute here, the first argument of the config.
_QuantizationConfig: Any = QuantizationConfigMixin


@dataclass
class NeuronALConfig(ConfigFields, _QuantizationConfig):
    """Settings of a prune. Checked when made: a wrong type raises `TypeError`, a wrong value `ValueError`.

    Fields after `topup_args` are keyword-only. A method's name may include hyper-parameters, as on the command line:
    `topup="owl:half_width=0.1"` means `topup="owl", topup_args={"half_width": 0.1}`.
    """

    quant_method: ClassVar[str] = "neuronal"

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name != "dataset":
                setattr(self, entry.name, as_json(getattr(self, entry.name)))
        self._split_method("saliency")
        self._split_method("topup")
        self._check_fields()
        self._check_amount()
        self._check_methods()

    def _split_method(self, kind: str) -> None:
        """Move hyper-parameters from the name of the saliency or top-up to its arguments."""
        method, place = getattr(self, kind), f"{kind}_args"
        values = _as_arguments(place, getattr(self, place))
        if isinstance(method, str) and ":" in method:
            name, own = parse_method(method)
            for key, value in as_json(own).items():
                if values.setdefault(key, value) != value:
                    raise ValueError(
                        f"{key} is given twice: {kind}={method!r}, but {place} has {values[key]!r}. Leave one of them out."
                    )
            setattr(self, kind, name)
        setattr(self, place, values)

    def _check_fields(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "least" in entry.metadata and not (value is None and entry.default is None):
                check_count(entry.name, value, entry.metadata["least"])
        check_flag("rotate", self.rotate)
        self.rotate_args = _as_arguments("rotate_args", self.rotate_args)
        if self.reconstruct is not None:
            check_choice("reconstruct", self.reconstruct, RECONSTRUCT)
        check_number("refit_learning_rate", self.refit_learning_rate, 0, above=True)
        if self.dataset == "":
            raise ValueError("dataset is empty: expected a name or a path, or None for data in memory.")
        if self.dataset is not None and not isinstance(self.dataset, str):
            raise TypeError(
                f"dataset is a {type(self.dataset).__name__}: expected a name or a path. Pass text or token ids in memory "
                "to NeuronALPruner(config).prune(model, dataset=...)."
            )
        for name in ("targets", "ignore"):
            patterns = getattr(self, name)
            for index, pattern in enumerate([] if patterns is None else check_texts(name, patterns, "['q_proj']")):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"{name}[{index}] is not a valid regular expression: {pattern!r}: {error}."
                    ) from error

    def _check_amount(self) -> None:
        """Raise unless either a sparsity or a number of bits is given, with fields that go with it."""
        sparsity, budget = self.sparsity, self.bits_per_weight
        if sparsity is None and budget is None:
            raise TypeError(
                "NeuronALConfig needs sparsity, such as 0.7, to set weights to zero; or bits_per_weight, such as 2.4, to "
                "quantize them."
            )
        if sparsity is not None:
            check_sparsity(sparsity)
        check_embedding_bits(self.embedding_bits)
        if budget is None:
            return
        check_number("bits_per_weight", budget, LEAST_BITS, MOST_BITS, above=True)
        if sparsity is not None:
            raise ValueError(f"Both sparsity={sparsity:g} and bits_per_weight={budget:g} are given: leave one out.")
        for entry in fields(self):
            if entry.name in OF_ZEROS and (value := getattr(self, entry.name)) not in (entry.default, {}):
                raise ValueError(
                    f"{entry.name} is {value!r}, but bits_per_weight={budget:g} quantizes the weights: leave it out."
                )
        if self.topup not in ("search", "uniform"):
            raise ValueError(
                f"topup is {self.topup!r}: with bits_per_weight, expected 'search', for rates by what the model loses, or "
                "'uniform'."
            )

    def _check_methods(self) -> None:
        methods, epochs = self.make_methods(), self.refit_epochs
        methods.check_together(self.sparsity)
        if epochs and not methods.saliency.updates_weights:
            raise ValueError(
                f"refit_epochs is {epochs}, but the saliency {methods.saliency.name!r} does not update weights: choose one "
                "that does, such as 'alps'."
            )
        if epochs and self.num_samples < FEWEST:
            raise ValueError(f"num_samples is {self.num_samples}: a refit needs at least {FEWEST}.")

    @property
    def amount(self) -> float:
        """The sparsity; or the bits per weight of a prune that quantizes."""
        amount = self.bits_per_weight if self.sparsity is None else self.sparsity
        assert amount is not None  # one of them was given
        return amount

    @property
    def default_format(self) -> str:
        """The format to save in: `"packed"` if weights are quantized, since a dense file loses their codes."""
        return "dense" if self.bits_per_weight is self.embedding_bits is None else "packed"

    def make_methods(self) -> Methods:
        """Make saliency, top-up, pattern and rotation with their hyper-parameters. Raise for unknown or invalid ones."""
        if self.bits_per_weight is not None:
            return Methods(
                LowBit(), Rates(self.bits_per_weight, "uniform" if self.topup == "uniform" else "divergence")
            )
        return Methods(
            SALIENCIES.make(self.saliency, "saliency_args", self.saliency_args),
            TOPUPS.make(self.topup, "topup_args", self.topup_args),
            None if self.pattern is None else ColumnPattern.parse(self.pattern),
            self.reconstruct,
            self._make_rotation(),
        )

    def _make_rotation(self) -> Rotation | None:
        if self.rotate_args and not self.rotate:
            raise ValueError(f"rotate_args is {self.rotate_args}, but rotate is False: set rotate=True.")
        rotation = make_checked(Rotation, "the rotation", "rotate_args", self.rotate_args)
        return rotation.at(self.sparsity) if self.rotate else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `quant_method`, JSON-serializable; `from_dict` makes an equal config of them."""
        return {"quant_method": self.quant_method, **asdict(self)}

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "NeuronALConfig":
        """Make a config from a preset of `config/presets.py`.

        ```python
        config = NeuronALConfig.preset("paper", sparsity=0.6)
        ```

        Args:
            name (`str`): `"paper"`, `"fast"`, `"best"`, `"few-bits"` or `"two-four"`.
            overrides: fields that are added or replaced.
        """
        check_choice("preset", name, list(PRESETS))
        return cls.from_dict(PRESETS[name], **overrides)

    @classmethod
    def from_json_file(cls, path: str | Path, **overrides: Any) -> "NeuronALConfig":
        """Make a config from a file that [`read_config_file`] reads; overrides are fields that replace the file's."""
        return cls.from_dict(read_config_file(path), **overrides)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Make a config from the dict that `to_dict` returned.

        Args:
            config_dict (`dict[str, Any]`): fields of the config.
            return_unused_kwargs (`bool`): True to also return the keyword arguments that are not fields.
            kwargs: override the dict's values.
        """
        if not isinstance(config_dict, Mapping):
            raise TypeError(f"config_dict is a {type(config_dict).__name__}: expected the dict from to_dict().")
        known, values = [entry.name for entry in fields(cls)], dict(config_dict)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"This is the config of {method!r}: expected one of {cls.quant_method!r}.")
        for key in values:
            if key not in known:
                raise ValueError(f"NeuronALConfig has no field {key!r}.{closest_or_all(key, known)}")
        unused = {key: value for key, value in kwargs.items() if key not in known}
        if unused and not return_unused_kwargs:
            key = next(iter(unused))
            raise TypeError(f"NeuronALConfig has no argument {key!r}.{closest_or_all(key, known)}")
        config = cls(**{**values, **{key: value for key, value in kwargs.items() if key in known}})
        return (config, unused) if return_unused_kwargs else config


if NeuronALConfig.__doc__:  # python -OO has none
    NeuronALConfig.__doc__ += f"\n    {arguments()}\n    "


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read fields of a config from a JSON file.

    The `config.json` or `neuronal_report.json` of a pruned model repeats its prune. Raise `ValueError` for other content.
    """
    text = Path(check_path("path", path)).read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    for key in ("sparsity_config", "config"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict):
        raise ValueError(f'{path} has no fields of the config: expected an object, such as {{"sparsity": 0.7}}.')
    return found


def _as_arguments(name: str, values: Any) -> dict[str, Any]:
    """Return hyper-parameters as a dict. Raise `TypeError` for values that JSON does not have."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{name} is {values!r}: expected a dict of hyper-parameters, or None.")
    for key, value in (values or {}).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} has {key}={value!r}: expected numbers, text, or lists of these.") from None
    return dict(values or {})
