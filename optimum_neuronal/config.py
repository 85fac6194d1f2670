"""`NeuronALConfig`: everything that decides how a model is pruned."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

from transformers.utils.quantization_config import QuantizationConfigMixin

from .config_aliases import as_arguments, as_json, merge_saved, understands_aliases
from .config_bits import check_budget, check_value_bits
from .config_fields import ALIASES, FORMATS, ConfigFields, check_embedding_bits, check_sparsity
from .config_files import read_config_file
from .efforts import EFFORTS, default_topup
from .methods import RECONSTRUCT, Methods, make_methods
from .registry import did_you_mean
from .saliency import SALIENCIES
from .topup import TOPUPS
from .validation import check_count, check_number


WANDA = "wanda"  # goes together with a top-up that weights must not move under
FEWEST = 16  # calibration sequences from which some may be held out of a refit


# Type checkers would make `quant_method`, a field there and a class attribute here, the first argument of the config.
_QuantizationConfig: Any = QuantizationConfigMixin


@understands_aliases
@dataclass
class NeuronALConfig(ConfigFields, _QuantizationConfig):
    """How to prune a model. Checked when made; bad values raise `ValueError` or `TypeError`.

    Args:
        sparsity (`float`, *optional*):
            Share of the weights of all linear projections in the decoder blocks to set to zero, in [0, 1). None: what
            `bits_per_weight` leave room for.
        saliency (`str`, *optional*):
            How weights are scored: `"alps"`, which also fits the weights that stay; `"sparsegpt"`, which does so less
            well; or `"wanda"`, `"ria"`, `"multiflow"`, `"magnitude"`, which leave them as they are. None: see `effort`.
        saliency_args (`dict`, *optional*): hyper-parameters of the saliency method, in the same way as `topup_args`.
        topup (`str`, *optional*):
            Where the sparsity goes: `"search"`, which loses least of all on every model tried; `"neuronal"` (the paper),
            `"uniform"`, `"owl"`, `"alpha_pruning"`, `"dlp"`, `"atp"`, `"dsnot"`, `"besa"`, `"dsa"` or `"evopress"`.
            None: see `effort`.
        topup_args (`dict`, *optional*):
            Hyper-parameters of the top-up: `{"steps": "block"}` with `topup="neuronal"`. Its class tells which there
            are. Sequences become lists, as JSON has them.
        effort (`str`):
            How much work the prune is worth: `"fast"`, `"default"` or `"best"`. It decides `saliency`, `topup` and
            `refit_epochs` where they are not given, see `EFFORTS`; the config then holds what they are.
        dataset (`str`, *optional*):
            Calibration text: `"c4"`, `"wikitext2"`, `"ptb"`, a Hub dataset as `"id:split:column"` or
            `"id:config:split:column"`, or a local .txt, .csv, .jsonl or .parquet file, or a folder of
            them. Text or token ids in memory are passed to `NeuronALPruner.prune` instead.
        num_samples (`int`): calibration sequences for the final pruning.
        num_alignment_samples (`int`): how many of them, from the first, the top-up measures its candidates on.
        seq_length (`int`, *optional*): tokens per sequence. None: the smaller of 2048 and what the model admits.
        batch_size (`int`, *optional*):
            Sequences per forward; changes memory and speed, and the result by rounding at most. A forward of a few
            tokens rounds otherwise than one of many; a saliency that updates weights passes that on to their values, and
            where tokens are fewer than input features, so that its fit is undetermined, to the choice of weights too.
            None: what makes about 2048 tokens.
        max_hidden_bytes (`int`, *optional*):
            Hidden states of the calibration sequences beyond this many bytes wait in CPU memory while they are not
            needed; changes memory and speed, not the result. None: they stay on the device.
        min_expert_tokens (`int`):
            An expert of a mixture that receives fewer calibration tokens than this is pruned as if all its inputs
            were equally active (with Wanda: by magnitude), and named in the report. Counted over the `num_samples`
            sequences for the pruning, over the `num_alignment_samples` for the top-up's trials.
        seed (`int`): seed of the draw of calibration sequences.
        targets (`Sequence[str]`, *optional*):
            Regular expressions, searched in full module names: only projections that match one are pruned, and
            sparsity is counted over them.
        ignore (`Sequence[str]`, *optional*): the same, for projections that are left out.
        pattern (`str`, *optional*):
            `"N:M"`: of every M consecutive weights of a row N are kept, for `topup="uniform"` and a sparsity of
            1 - N/M; 2:4 is what NVIDIA's sparse tensor cores compute with. None: zeros may lie anywhere in a row.
        reconstruct (`str`, *optional*):
            What a saliency that updates weights brings the outputs of projections near to: `"dense"`, those that they
            have in the dense model, a block's projections being solved one after the other; or `"block"`, those of the
            dense block on what the sparse blocks before it put out. None: what the saliency's class says.
        refit_epochs (`int`, *optional*):
            Epochs in which the kept weights of each block are fitted to the dense block's output by gradients, masks
            being what they are, for a saliency that updates weights: better, and slower, see [`Refit`]. 0: none. None: see `effort`.
        refit_learning_rate (`float`):
            How far its steps move weights at first, as a share of the root mean square of a matrix's kept weights; above 0.
        value_bits (`int`, *optional*):
            8, 4, 3 or 2: kept values are rounded to so many bits, with a scale for each row and 128 columns
            (docs/format.md); where the saliency updates weights, they make up for each other's rounding
            (docs/few_bits.md). The model in memory has the rounded values, and computes with them as with any others; with
            `format="packed"` they are stored as codes, with `format="dense"` as ordinary numbers, which `convert` makes
            codes of later. None: values stay as they are.
        bits_per_weight (`float`, *optional*):
            A budget of bits a weight, above 1.0625, that masks, codes and scales of the projections take in all: 2.4. With
            `sparsity` the most `value_bits` that fit follow from it; with `value_bits` the least sparsity; alone, of all
            such pairs the one that loses least is chosen, by the divergence of next-token distributions. The report's
            config holds the pair instead.
        embedding_bits (`int`, *optional*):
            8: token embeddings and head are rounded to 8 bits, with a scale for each row and 128 columns, and stored so;
            for `format="packed"` alone. Tied ones stay one. None: they stay as they are.
        format (`str`):
            How the model is saved: `"dense"`, ordinary safetensors with zeros; or `"packed"`, the non-zero values and
            bitmasks, which load in processes that have imported this package only (docs/format.md).

    A method's name may come with hyper-parameters, as on the command line: `topup="owl:half_width=0.1"` means
    `topup="owl", topup_args={"half_width": 0.1}`.

    What follows `topup_args` is given by name. `steps`, `reference`, `alignment_scope`, `block_lambdas` and `row_lambdas`
    are understood as well: they were fields once and go to `topup_args` of NeuronAL, see [`NeuronAL`]. To read one gives
    the value in force; with another top-up it raises `AttributeError`.
    """

    quant_method: ClassVar[str] = "neuronal"

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.name != "dataset":
                setattr(self, entry.name, as_json(getattr(self, entry.name)))
        self._check_amount()
        self._fill_in()
        positive = ("num_samples", "num_alignment_samples", "min_expert_tokens")
        for name, smallest in (*((name, 1) for name in positive), ("seed", 0), ("refit_epochs", 0)):
            check_count(name, getattr(self, name), smallest)
        for name, smallest in (("seq_length", 2), ("batch_size", 1), ("max_hidden_bytes", 0)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), smallest)
        if self.num_alignment_samples > self.num_samples:
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
            setattr(self, name, _checked_patterns(name, getattr(self, name)))
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}: expected one of {', '.join(map(repr, FORMATS))}.")
        check_embedding_bits(self.embedding_bits, self.format)
        if self.reconstruct not in (None, *RECONSTRUCT):
            raise ValueError(
                f"reconstruct is {self.reconstruct!r}: expected one of {', '.join(map(repr, RECONSTRUCT))}, or None."
                f"{did_you_mean(self.reconstruct, list(RECONSTRUCT))}"
            )
        for name in ("saliency_args", "topup_args"):
            setattr(self, name, as_arguments(name, getattr(self, name)))
        methods = self.make_methods()
        methods.check_together(self.sparsity)
        if self.sparsity is None and self.value_bits is None and not methods.needs_calibration:
            raise ValueError(
                f"bits_per_weight is {self.bits_per_weight:g} alone, which is divided on calibration sequences, but {self.saliency!r} with "
                f"{self.topup!r} looks at none: give value_bits too, or sparsity."
            )
        check_number("refit_learning_rate", self.refit_learning_rate, 0, above=True)
        if self.refit_epochs and not methods.saliency.updates_weights:
            raise ValueError(
                f"refit_epochs is {self.refit_epochs}, but the saliency {self.saliency!r} leaves the weights that stay as "
                "they are: choose one that updates them, such as 'alps'."
            )
        if self.refit_epochs and self.num_samples < FEWEST:
            raise ValueError(
                f"num_samples is {self.num_samples}: to refit takes at least {FEWEST}, some of which are held out."
            )

    def _check_amount(self) -> None:
        """How much is to be pruned and rounded."""
        if self.sparsity is None and self.bits_per_weight is None:
            raise TypeError("NeuronALConfig needs a sparsity, such as 0.7, or bits, such as bits_per_weight=2.4.")
        if self.sparsity is not None:
            check_sparsity(self.sparsity)
        if self.value_bits is not None:
            check_value_bits(self.value_bits)
        if self.bits_per_weight is not None:
            check_budget(self.bits_per_weight, self.sparsity, self.value_bits, self.pattern)

    def _fill_in(self) -> None:
        """What is not given is as the effort says, if it goes together with what is given."""
        if not isinstance(self.effort, str) or self.effort not in EFFORTS:
            known = list(EFFORTS)
            raise ValueError(
                f"effort is {self.effort!r}: expected one of {', '.join(map(repr, known))}."
                f"{did_you_mean(self.effort, known)}"
            )
        meant = EFFORTS[self.effort]
        if self.topup is None:
            self.topup = default_topup(self.effort, self.pattern)
        if self.saliency is None:
            self.saliency = WANDA if TOPUPS.get(self.topup).needs_fixed_weights else meant["saliency"]
        if self.refit_epochs is None:
            # Fitted values that are rounded then lose on text unlike the calibration's: docs/few_bits.md
            pays = (
                SALIENCIES.get(self.saliency).updates_weights
                and self.value_bits is None
                and self.bits_per_weight is None
            )
            self.refit_epochs = meant["refit_epochs"] if pays else 0

    def make_methods(self) -> Methods:
        """Saliency, top-up and pattern, with their hyper-parameters; made anew by every call.

        Raises:
            `ValueError`: an unknown name, an unknown hyper-parameter, or a value that a method refuses.
        """
        assert self.saliency is not None and self.topup is not None  # see _fill_in
        return make_methods(
            self.saliency, self.saliency_args, self.topup, self.topup_args, self.pattern, self.reconstruct
        )

    def __eq__(self, other: object) -> bool:
        """Whether both say the same: a hyper-parameter that is not given is the same as its default."""
        if not isinstance(other, NeuronALConfig):
            return NotImplemented
        return asdict(self) == asdict(other) or self._meant() == other._meant()

    def _meant(self) -> dict[str, Any]:
        """The fields, with the methods instead of those hyper-parameters of theirs that were given."""
        methods = self.make_methods()
        return {**asdict(self), "saliency_args": methods.saliency, "topup_args": methods.topup}

    def to_dict(self) -> dict[str, Any]:
        """All fields and `quant_method`, JSON-serialisable; `from_dict` makes an equal config of it."""
        return {"quant_method": self.quant_method, **asdict(self)}

    @classmethod
    def from_json_file(cls, path: str | Path) -> "NeuronALConfig":
        """Makes a config from what `to_json_file` wrote, or any other file that [`read_config_file`] understands."""
        return cls.from_dict(read_config_file(path))

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
        """Makes a config from the dict that `to_dict` returns, or did in an earlier release.

        Args:
            config_dict (`dict[str, Any]`): fields of the config; required is `sparsity` or `bits_per_weight` alone.
            return_unused_kwargs (`bool`): whether to return the keyword arguments that are no fields too.
            kwargs: override the dict's values.

        Returns:
            `NeuronALConfig`, or `tuple` of it and the `dict` of unused keyword arguments.

        Raises:
            `ValueError`: the dict is another method's, or has keys that are not fields.
        """
        known = [*(entry.name for entry in fields(cls)), *ALIASES]
        if not isinstance(config_dict, Mapping):
            raise TypeError(
                f"config_dict is a {type(config_dict).__name__}: expected what to_dict() returned, a dict."
            )
        values = dict(config_dict)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"This is the config of {method!r}, not of {cls.quant_method!r}.")
        for key in values:
            if key not in known:
                raise ValueError(f"NeuronALConfig has no field {key!r}.{did_you_mean(key, known)}")
        config = cls(**merge_saved(values, {key: kwargs.pop(key) for key in list(kwargs) if key in known}))
        return (config, kwargs) if return_unused_kwargs else config


def _checked_patterns(name: str, patterns: Any) -> list[str] | None:
    if patterns is None:
        return None
    patterns = patterns if isinstance(patterns, str) or not isinstance(patterns, Iterable) else list(patterns)
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name} is {patterns!r}: expected a list of regular expressions, such as ['q_proj'].")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} holds {pattern!r}, which is no regular expression: {error}.") from error
    return patterns
