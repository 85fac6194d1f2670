"""`NeuronALConfig`: everything that decides how a model is pruned."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

import yaml  # transformers and huggingface_hub bring it
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..common.notes import get_logger
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
    did_you_mean,
    names_closest_keyword,
)
from ..rotation.learning import Rotation
from ..saliency import SALIENCIES
from ..saliency.few_bits import FewBits
from ..saliency.masks import ColumnPattern
from ..topup import TOPUPS
from ..topup.quantising import Rates
from .config_fields import EFFORTS, ConfigFields, arguments, as_json, find_recipe
from .methods import RECONSTRUCT, Methods


logger = get_logger(__name__)

FEWEST = 16  # calibration sequences from which some may be held out of a refit
LEAST_BITS, MOST_BITS = 2, 9  # a weight: codes of the fewest bits; more than codes of the most and their scales
# What only a prune that sets weights to zero knows.
OF_ZEROS = ("saliency", "saliency_args", "topup_args", "pattern", "reconstruct", "refit_epochs")
YAML = (".yaml", ".yml")

# Type checkers would make `quant_method`, a field there and a class attribute here, the first argument of the config.
_QuantizationConfig: Any = QuantizationConfigMixin


@dataclass(eq=False)
class NeuronALConfig(ConfigFields, _QuantizationConfig):
    """Settings of a prune. Checked when made: a wrong type raises `TypeError`, a wrong value `ValueError`.

    A field that is not given stays None; [`~NeuronALConfig.resolved`] fills it in. What follows `topup_args` is given by
    name. A method's name may come with hyper-parameters, as on the command line: `topup="owl:half_width=0.1"` means
    `topup="owl", topup_args={"half_width": 0.1}`.
    """

    quant_method: ClassVar[str] = "neuronal"

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name != "dataset":
                setattr(self, entry.name, as_json(getattr(self, entry.name)))
        for kind in ("saliency", "topup"):
            self._split_method(kind)
        self._check_fields()
        self._check_amount()
        self._check_methods()

    def _split_method(self, kind: str) -> None:
        """Move hyper-parameters that come with the name of the saliency or top-up to the others."""
        method, place = getattr(self, kind), f"{kind}_args"
        values = _as_arguments(place, getattr(self, place))
        if isinstance(method, str) and ":" in method:
            name, own = parse_method(method)
            for key, value in as_json(own).items():
                if values.setdefault(key, value) != value:
                    raise ValueError(
                        f"{key} is given twice and differently: {kind}={method!r}, but {place} holds {values[key]!r}. Leave "
                        "one of them out."
                    )
            setattr(self, kind, name)
        setattr(self, place, values)

    def _check_fields(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "least" in entry.metadata and not (value is None and entry.default is None):
                check_count(entry.name, value, entry.metadata["least"])
        check_choice("effort", self.effort, list(EFFORTS))
        if self.rotate is not None:
            check_flag("rotate", self.rotate)
        self.rotate_args = _as_arguments("rotate_args", self.rotate_args)
        if self.reconstruct is not None:
            check_choice("reconstruct", self.reconstruct, RECONSTRUCT)
        check_number("refit_learning_rate", self.refit_learning_rate, 0, above=True)
        if (self.num_alignment_samples or 1) > self.num_samples:
            raise ValueError(
                f"num_alignment_samples is {self.num_alignment_samples}, more than num_samples={self.num_samples}: the "
                "top-up's sequences are the first of the calibration sequences."
            )
        if self.dataset == "":
            raise ValueError("dataset is empty: expected a name or a path, or None for data in memory.")
        if self.dataset is not None and not isinstance(self.dataset, str):
            raise TypeError(
                f"dataset is a {type(self.dataset).__name__}: the config holds a name or a path. Pass text or token "
                "ids in memory to NeuronALPruner(config).prune(model, dataset=...)."
            )
        for name in ("targets", "ignore"):
            patterns = getattr(self, name)
            for pattern in [] if patterns is None else check_texts(name, patterns, "['q_proj']"):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name} holds {pattern!r}, which is no regular expression: {error}.") from error

    def _check_amount(self) -> None:
        """Raise `TypeError` or `ValueError` unless there is one of sparsity and bits, and what goes with it."""
        sparsity, budget = self.sparsity, self.bits_per_weight
        if sparsity is None and budget is None:
            raise TypeError(
                "NeuronALConfig needs a sparsity, such as 0.7, to set weights to zero, or bits, such as bits_per_weight=2.4, to "
                "quantise them."
            )
        if sparsity is not None:
            check_sparsity(sparsity)
        check_embedding_bits(self.embedding_bits)
        if budget is None:
            return
        check_number("bits_per_weight", budget, LEAST_BITS, MOST_BITS, above=True)
        if sparsity is not None:
            raise ValueError(
                f"sparsity={sparsity:g} and bits_per_weight={budget:g} are given, but a prune either sets weights to zero or "
                "quantises all of them: leave one out."
            )
        for name in OF_ZEROS:
            if value := getattr(self, name):
                raise ValueError(
                    f"{name} is {value!r}, which is for weights that are set to zero, but bits_per_weight={budget:g} quantises "
                    "them: leave it out."
                )
        if self.topup not in (None, "uniform"):
            raise ValueError(
                f"topup is {self.topup!r}, which divides a sparsity: with bits_per_weight, expected 'uniform', or None for rates "
                "by what the model loses."
            )
        if self.rotate:
            raise ValueError(
                "rotate is True, but a rotation serves weights that are set to zero, and quantised ones lose more by it: leave it "
                "out with bits_per_weight."
            )

    def _check_methods(self) -> None:
        """Raise `ValueError` unless the methods go together, and with the other fields."""
        methods, epochs = self.make_methods(), self._filled()["refit_epochs"]
        methods.check_together(self.sparsity)
        saliency = methods.saliency.name
        if epochs and not methods.saliency.updates_weights:
            raise ValueError(
                f"refit_epochs is {epochs}, but the saliency {saliency!r} leaves the kept weights as they are: choose one "
                "that updates them, such as 'alps'."
            )
        if epochs and self.num_samples < FEWEST:
            raise ValueError(
                f"num_samples is {self.num_samples}: to refit takes at least {FEWEST}, some of which are held out."
            )

    def _filled(self) -> dict[str, Any]:
        """Return the fields that are None, filled in by the effort and what goes with the rest; given fields are unchanged."""
        effort = EFFORTS[self.effort]
        topup, saliency, epochs = self.topup, self.saliency, self.refit_epochs
        samples = min(8, self.num_samples) if self.num_alignment_samples is None else self.num_alignment_samples
        if self.bits_per_weight is not None:
            fixed = {"refit_epochs": 0, "rotate": False, "num_alignment_samples": samples}
            return {"topup": topup or effort["rates"], **fixed}
        if topup is None:
            topup = effort["topup"] if self.pattern is None else "uniform"
        if saliency is None:
            saliency = "wanda" if TOPUPS.get(topup).needs_fixed_weights else effort["saliency"]
        updates_weights = SALIENCIES.get(saliency).updates_weights
        if epochs is None:
            epochs = effort["refit_epochs"] if updates_weights else 0
        filled = {"saliency": saliency, "topup": topup, "refit_epochs": epochs, "num_alignment_samples": samples}
        if self.rotate is not None:
            return {**filled, "rotate": self.rotate}
        if effort["rotate"] and self.saliency is None and updates_weights:  # one that is named is as it was published
            return {**filled, "rotate": True, "rotate_args": {"untie": False}}
        return {**filled, "rotate": False}

    @property
    def amount(self) -> float:
        """The sparsity, or the bits a weight of a prune that quantises."""
        amount = self.bits_per_weight if self.sparsity is None else self.sparsity
        assert amount is not None  # one of them was given
        return amount

    @property
    def default_format(self) -> str:
        """The format of a prune's model unless it is given: `"packed"` if weights are quantised, whose codes a dense save loses."""
        return "dense" if self.bits_per_weight is self.embedding_bits is None else "packed"

    def resolved(self) -> "NeuronALConfig":
        """Return the config with `saliency`, `topup`, `refit_epochs`, `rotate` and `num_alignment_samples` filled in.

        A rotation that is filled in is left out for a model that cannot be rotated: see [`PruneContext.of`].
        """
        return replace(self, **self._filled())

    def make_methods(self) -> Methods:
        """Make saliency, top-up and pattern with their hyper-parameters, anew at every call.

        Raises:
            `ValueError`, `TypeError`: an unknown name, an unknown hyper-parameter, or a value that a method refuses.
        """
        filled = self._filled()
        if self.bits_per_weight is not None:
            return Methods(FewBits(), Rates(self.bits_per_weight, filled["topup"] or "divergence"))
        return Methods(
            SALIENCIES.make(filled["saliency"], "saliency_args", self.saliency_args),
            TOPUPS.make(filled["topup"], "topup_args", self.topup_args),
            None if self.pattern is None else ColumnPattern.parse(self.pattern),
            self.reconstruct,
            self._make_rotation(filled),
        )

    def _make_rotation(self, filled: Mapping[str, Any]) -> Rotation | None:
        """Make the rotation with its hyper-parameters, of the filled fields. Raise as [`~NeuronALConfig.make_methods`] does."""
        known = [entry.name for entry in fields(Rotation)]
        for key in self.rotate_args:
            if key not in known:
                raise ValueError(
                    f"rotate_args holds {key!r}: expected one of {', '.join(known)}.{did_you_mean(key, known)}"
                )
        if self.rotate_args and not self.rotate:
            raise ValueError(
                f"rotate_args is {self.rotate_args}, but rotate is {self.rotate}: set rotate=True, or leave them out."
            )
        return Rotation(**filled.get("rotate_args", self.rotate_args)).at(self.sparsity) if filled["rotate"] else None

    def __eq__(self, other: object) -> bool:
        """Return True if both prune alike: what is not given equals its default."""
        return self._meaning() == other._meaning() if isinstance(other, NeuronALConfig) else NotImplemented

    def _meaning(self) -> dict[str, Any]:
        methods = self.make_methods()
        return {
            **asdict(self),
            **self._filled(),
            "saliency_args": methods.saliency,
            "topup_args": methods.topup,
            "rotate_args": methods.rotation,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and `quant_method`, JSON-serialisable; `from_dict` makes an equal config of them."""
        return {"quant_method": self.quant_method, **asdict(self)}

    @classmethod
    def from_json_file(cls, path: str | Path, **overrides: Any) -> "NeuronALConfig":
        """Make a config of a recipe: its name, what `to_json_file` wrote, or another file that [`read_config_file`] reads.

        Args:
            path (`str` or `Path`): such as `"balanced"` or `"mine.yaml"`.
            overrides: fields that replace the recipe's.
        """
        return cls.from_dict(read_config_file(path), **overrides)

    @overload
    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: Literal[False] = False, **kwargs: Any
    ) -> "NeuronALConfig": ...

    @overload
    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: Literal[True], **kwargs: Any
    ) -> tuple["NeuronALConfig", dict[str, Any]]: ...

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Make a config of the dict that `to_dict` returned.

        Args:
            config_dict (`dict[str, Any]`): fields of the config.
            return_unused_kwargs (`bool`): True to return the keyword arguments that are no fields too.
            kwargs: override the dict's values.

        Returns:
            `NeuronALConfig`, or `tuple` of it and the `dict` of unused keyword arguments.

        Raises:
            `ValueError`: the dict is another method's, or has keys that are not fields.
            `TypeError`: a keyword argument is no field, and is not to be returned; or a value of a wrong type.
        """
        if not isinstance(config_dict, Mapping):
            raise TypeError(
                f"config_dict is a {type(config_dict).__name__}: expected what to_dict() returned, a dict."
            )
        known, values = [entry.name for entry in fields(cls)], dict(config_dict)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"This is the config of {method!r}, not of {cls.quant_method!r}.")
        for key in values:
            if key not in known:
                raise ValueError(f"NeuronALConfig has no field {key!r}.{closest_or_all(key, known)}")
        overriding = {key: kwargs.pop(key) for key in known if key in kwargs}
        for key in () if return_unused_kwargs else kwargs:
            raise TypeError(f"NeuronALConfig has no argument {key!r}.{closest_or_all(key, known)}")
        config = cls(**values | overriding)
        return (config, kwargs) if return_unused_kwargs else config


NeuronALConfig.__init__ = names_closest_keyword(NeuronALConfig.__init__)  # type: ignore[method-assign]
if NeuronALConfig.__doc__:  # python -OO has none
    NeuronALConfig.__doc__ += f"\n    {arguments()}\n    "


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read fields of a config. The config that is made of them checks names and values.

    Args:
        path (`str` or `Path`):
            A .json, .yaml or .yml file with fields of the config; the `neuronal_report.json` of a pruned model, whose
            config is taken; or the name of a recipe that comes with the package: `"balanced"`. A file of that name in the
            working directory is `"./balanced"`; a warning says so if there is one.

    Raises:
        `ValueError`: the file is none of these.
        `OSError`: it cannot be read.
    """
    check_path("path", path)
    given, path = path, find_recipe(path)
    if path != Path(given) and Path(given).is_file():
        logger.warning(
            f"{given!r} is a recipe of the package: write './{given}' for the file in the working directory."
        )
    try:
        text = path.read_bytes().decode("utf-8")
        found = yaml.safe_load(text) if path.suffix.lower() in YAML else json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} cannot be read: lists and objects lie in each other too deep.") from None
    except (ValueError, yaml.YAMLError) as error:  # a ValueError of json and of text that is not UTF-8
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(found, dict) and isinstance(found.get("config"), dict):
        found = found["config"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} holds no fields of the config: expected a mapping, such as sparsity: 0.7.")
    return found


def _as_arguments(name: str, values: Any) -> dict[str, Any]:
    """Return hyper-parameters as JSON has them; raise `TypeError` for values that JSON does not have."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(f"{name} is {values!r}: expected a dict of hyper-parameters, or None.")
    for key, value in (values or {}).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise TypeError(f"{name} holds {key}={value!r}: expected numbers, text, or lists of these.") from None
    return dict(values or {})
