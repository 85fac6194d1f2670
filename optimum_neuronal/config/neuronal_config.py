"""`NeuronALConfig`: everything that decides how a model is pruned."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..common.registry import title_of
from ..common.validation import check_choice, check_field, check_patterns, check_sparsity
from ..saliency import SALIENCIES, Saliency
from ..saliency.plan import ColumnPattern
from ..topup import TOPUPS, TopUp
from .config_fields import ConfigFields, as_json, check_dataset_names, explain
from .presets import PRESETS, replace_fields


REFIT_SAMPLES = 16  # calibration sequences that a refit needs at least: it holds some out

# Type checkers would make `quant_method`, a field there and a class attribute here, the first argument of the config.
_QuantizationConfig: Any = QuantizationConfigMixin


@dataclass(frozen=True)
class Methods:
    """The methods of a pruning run: the scores, where the sparsity goes, and which weights may be pruned together."""

    saliency: Saliency
    topup: TopUp
    pattern: ColumnPattern | None = None  # N:M; None: zeros may be anywhere in a row
    title: str = field(default="", compare=False)  # for reports: `"wanda + neuronal, authors, block and row steps"`

    @property
    def needs_calibration(self) -> bool:
        """True if saliency or top-up look at activations."""
        return self.saliency.uses_activations or self.topup.uses_calibration


@dataclass
class NeuronALConfig(ConfigFields, _QuantizationConfig):
    """Settings of a pruning run. Checked when made: a wrong type raises `TypeError`, a wrong value `ValueError`.

    It does not change afterwards: `dataclasses.replace` makes another. Fields after `topup_args` are keyword-only.
    """

    quant_method: ClassVar[str] = "neuronal"

    def __post_init__(self) -> None:
        in_memory = "Pass text or token ids in memory to NeuronALPruner(config).prune(model, dataset=...)."
        names = check_dataset_names(() if self.dataset is None else self.dataset, in_memory)
        self.dataset = names[0] if len(names) == 1 else names or None
        self._check_fields()
        check_sparsity(self.sparsity)
        self.methods = self._make_methods()
        self._check_together()

    @property
    def dataset_names(self) -> list[str]:
        """Names of the datasets, none if the text is passed to `prune`."""
        return [self.dataset] if isinstance(self.dataset, str) else [*(self.dataset or ())]

    def _check_fields(self) -> None:
        """Check every field by itself, and make its value JSON-serializable."""
        for entry in fields(self):
            name, value = entry.name, getattr(self, entry.name)
            try:
                value = as_json(value)
            except TypeError:
                raise TypeError(f"{name} is {value!r}: expected numbers, text, or lists of these.") from None
            if entry.default_factory is not MISSING and not isinstance(value, dict):
                raise TypeError(f"{name} is {value!r}: expected a dict of hyperparameters.")
            setattr(self, name, check_field(entry, value))
        for name in ("targets", "ignore"):
            if getattr(self, name) is not None:
                check_patterns(name, getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if "methods" in vars(self):
            raise AttributeError(f"A config does not change: use dataclasses.replace(config, {name}=...).")
        super().__setattr__(name, value)

    def _make_methods(self) -> Methods:
        saliency = SALIENCIES.make(self.saliency, "saliency_args", self.saliency_args)
        if self.topup is None:  # NeuronAL's candidates are masks, which say less of updated weights
            alike = self.pattern is not None or saliency.updates_weights
            self.topup = "uniform" if alike and not self.topup_args else "neuronal"
        topup = TOPUPS.make(self.topup, "topup_args", self.topup_args)
        if saliency.updates_weights and topup.needs_fixed_weights:
            raise ValueError(
                f"The top-up {topup.name!r} needs the kept weights to stay as they are, but the saliency "
                f"{saliency.name!r} updates them: choose one that does not, such as 'wanda'."
            )
        pattern = None if self.pattern is None else ColumnPattern.parse(self.pattern)
        title = [f"{title_of(saliency)} + {topup.title(saliency)}"]
        title += [f"pattern {pattern}"] if pattern else []
        title += [f"refit of {self.refit_epochs} epochs"] if self.refit_epochs else []
        return Methods(saliency, topup, pattern, ", ".join(title))

    def _check_together(self) -> None:
        saliency, topup, pattern = self.methods.saliency, self.methods.topup, self.methods.pattern
        if self.refit_epochs and not saliency.updates_weights:
            raise ValueError(
                f"refit_epochs is {self.refit_epochs}, but the saliency {saliency.name!r} does not update weights: choose one "
                "that does, such as 'alps', or leave refit_epochs out."
            )
        if self.refit_epochs and topup.scores_dense:
            raise ValueError(
                f"refit_epochs is {self.refit_epochs}, but {topup.title()} scores the weights of the dense model: set its "
                "final_scores='sparse-stream', or leave refit_epochs out."
            )
        if self.refit_epochs and self.num_samples < REFIT_SAMPLES:
            raise ValueError(f"num_samples is {self.num_samples}: a refit needs at least {REFIT_SAMPLES}.")
        if self.num_samples < (count := len(self.dataset_names)):
            raise ValueError(f"num_samples is {self.num_samples}: expected at least one for each of {count} datasets.")
        if pattern is not None and topup.decides:
            raise ValueError(
                f"The pattern {pattern} prunes the same share everywhere, so there is nothing for the top-up "
                f"{topup.name!r} to decide: set topup='uniform'."
            )
        if pattern is not None and abs(self.sparsity - pattern.sparsity) > 1e-6:
            raise ValueError(
                f"The pattern {pattern} means sparsity={pattern.sparsity:g}, but it is {self.sparsity}: set "
                f"sparsity={pattern.sparsity:g}."
            )

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
            name (`str`): `"paper"`, `"fast"`, `"best"` or `"two-four"`.
            overrides:
                Fields that are added or replaced. Hyperparameters are merged into the preset's. Under `"paper"`, another
                method has the variant `"authors"` too, if there is one.
        """
        check_choice("preset", name, list(PRESETS))
        return cls.from_dict(replace_fields(PRESETS[name], overrides, name))

    @classmethod
    def from_json_file(cls, path: str | Path, **overrides: Any) -> "NeuronALConfig":
        """Make a config from a file that [`read_config_file`] reads; overrides are fields that replace the file's."""
        return cls.from_dict(read_config_file(path), **overrides)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> "NeuronALConfig":
        """Make a config from the dict that `to_dict` returned.

        Args:
            config_dict (`dict[str, Any]`): fields of the config.
            kwargs: override the dict's values, see [`replace_fields`].
        """
        known = [entry.name for entry in fields(cls)]
        values = replace_fields(config_dict, kwargs)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"This config is for {method!r}: expected one for {cls.quant_method!r}.")
        for key in values:
            check_choice("a field of NeuronALConfig", key, known)
        if "sparsity" not in values:
            raise TypeError("The config has no sparsity: expected a share of zeros, such as 0.7.")
        return cls(**values)


if NeuronALConfig.__doc__:  # python -OO has none
    _lines = (f"        {entry.name}: {explain(entry)}." for entry in fields(ConfigFields))
    NeuronALConfig.__doc__ += "\n".join(["\n    Args:", *_lines, "    "])


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Read fields of a config from a JSON file.

    The `config.json` or `neuronal_report.json` of a pruned model repeats its run. Raise `ValueError` for other content.
    """
    try:
        values = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    for key in ("sparsity_config", "config"):
        if isinstance(values, dict) and isinstance(values.get(key), dict):
            values = values[key]
    if not isinstance(values, dict):
        raise ValueError(f'{path} has no fields of the config: expected an object, such as {{"sparsity": 0.7}}.')
    return values
