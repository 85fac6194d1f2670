"""`NeuronALConfig`: everything that decides how a model is pruned."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from .methods import Methods, make_method, make_methods
from .runtime.registry import did_you_mean
from .topup import TOPUPS, TopUp
from .topup.neuronal import LAMBDAS


logger = logging.get_logger(__name__)

FORMATS = ("dense", "packed")


@dataclass
class NeuronALConfig(QuantizationConfigMixin):
    """How to prune a model. Checked when made; bad values raise `ValueError` or `TypeError`.

    Args:
        sparsity (`float`):
            Share of the weights of all linear projections in the decoder blocks to set to zero, in [0, 1).
        saliency (`str`): how weights are scored: `"magnitude"`, `"wanda"`, `"multiflow"`, `"ria"`, `"sparsegpt"`.
        saliency_args (`dict`, *optional*): hyper-parameters of the saliency method.
        topup (`str`):
            Where the sparsity goes: `"search"`, which loses least of all on every model tried; `"neuronal"` (the paper),
            `"uniform"`, `"owl"`, `"alpha_pruning"`, `"dlp"`, `"atp"`, `"dsnot"`, `"besa"`, `"dsa"` or `"evopress"`.
        topup_args (`dict`, *optional*): further hyper-parameters of the top-up.
        steps (`str`): with `topup="neuronal"`: the steps to take, `"both"`, `"block"` or `"row"`.
        reference (`str`):
            Where NeuronAL's dense activations come from: `"sparse-stream"`, each candidate's block run dense on that
            candidate's own hidden states; or `"dense"`, the dense model's own stream.
        alignment_scope (`str`):
            `"sequence"`: alignment errors are taken for every sequence and summed (the paper's Eq. 3); `"pooled"`:
            one error over all sequences (the authors' code).
        block_lambdas (`Sequence[float]`): half-widths of the block step's sparsity windows, in [0, 1].
        row_lambdas (`Sequence[float]`): the same for the row step; 0.0 stands for leaving the rows alone.
        dataset (`str`, *optional*):
            Calibration text: `"c4"`, `"wikitext2"`, `"ptb"`, a Hub dataset as `"id:split:column"`, or a local .txt,
            .jsonl or .parquet file. Text or token ids in memory are passed to `NeuronALPruner.prune` instead.
        num_samples (`int`): calibration sequences for the final pruning.
        num_alignment_samples (`int`): how many of them, from the first, the top-up measures its candidates on.
        seq_length (`int`, *optional*): tokens per sequence. None: the smaller of 2048 and what the model admits.
        batch_size (`int`, *optional*):
            Sequences per forward; changes memory and speed, not the result. None: what makes about 2048 tokens.
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
        format (`str`):
            How the model is saved: `"dense"`, ordinary safetensors with zeros; or `"packed"`, the non-zero values and
            bitmasks, which load in processes that have imported this package only (docs/format.md).
    """

    sparsity: float
    saliency: str = "wanda"
    saliency_args: dict[str, Any] = field(default_factory=dict)
    topup: str = "search"
    topup_args: dict[str, Any] = field(default_factory=dict)
    steps: str = "both"
    reference: str = "sparse-stream"
    alignment_scope: str = "sequence"
    block_lambdas: Sequence[float] = LAMBDAS
    row_lambdas: Sequence[float] = (0.0, *LAMBDAS)
    dataset: str | None = "c4"
    num_samples: int = 128
    num_alignment_samples: int = 8
    seq_length: int | None = None
    batch_size: int | None = None
    max_hidden_bytes: int | None = None
    min_expert_tokens: int = 32
    seed: int = 0
    targets: Sequence[str] | None = None
    ignore: Sequence[str] | None = None
    pattern: str | None = None
    format: str = "dense"

    quant_method: ClassVar[str] = "neuronal"

    def __post_init__(self):
        if isinstance(self.sparsity, bool) or not isinstance(self.sparsity, (int, float)):
            raise TypeError(f"sparsity is {self.sparsity!r}: expected a number in [0, 1), such as 0.7.")
        if not 0 <= self.sparsity < 1:
            hint = f" Did you mean {self.sparsity / 100:g}?" if 1 < self.sparsity < 100 else ""
            raise ValueError(f"sparsity is {self.sparsity}: expected a share in [0, 1), such as 0.7.{hint}")
        positive = ("num_samples", "num_alignment_samples", "min_expert_tokens")
        for name, smallest in (*((name, 1) for name in positive), ("seed", 0)):
            _check_int(name, getattr(self, name), smallest)
        for name, smallest in (("seq_length", 2), ("batch_size", 1), ("max_hidden_bytes", 0)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), smallest)
        if self.num_alignment_samples > self.num_samples:
            raise ValueError(
                f"num_alignment_samples is {self.num_alignment_samples}, more than num_samples={self.num_samples}: the "
                "top-up's sequences are the first of the calibration sequences."
            )
        if self.dataset is not None and not isinstance(self.dataset, str):
            raise TypeError(
                f"dataset is a {type(self.dataset).__name__}: the config holds a name or a path. Pass text or token "
                "ids in memory to NeuronALPruner(config).prune(model, dataset=...)."
            )
        for name in ("targets", "ignore"):
            setattr(self, name, _checked_patterns(name, getattr(self, name)))
        if self.format not in FORMATS:
            raise ValueError(f"format is {self.format!r}: expected one of {', '.join(map(repr, FORMATS))}.")
        methods = self.make_methods()  # which checks their names and hyper-parameters
        methods.check_together(self.sparsity)
        self._warn_about_unused(methods.topup)
        self.block_lambdas, self.row_lambdas = list(self.block_lambdas), list(self.row_lambdas)

    def make_methods(self) -> Methods:
        """Saliency, top-up and pattern, with their hyper-parameters; made anew by every call.

        The top-up's are this config's fields of the same name, and `topup_args`.
        """
        accepted = {entry.name for entry in fields(TOPUPS.get(self.topup))}
        own = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name in accepted}
        return make_methods(self.saliency, self.saliency_args, self.topup, own | self.topup_args, self.pattern)

    def _warn_about_unused(self, topup: TopUp) -> None:
        users: dict[str, list[str]] = {}
        for name in TOPUPS.names():
            for entry in fields(TOPUPS.get(name)):
                users.setdefault(entry.name, []).append(name)
        used = {entry.name for entry in fields(topup)}
        for entry in fields(self):
            value = getattr(self, entry.name)
            value = tuple(value) if isinstance(value, list) else value
            if entry.name in users and entry.name not in used and value != entry.default:
                for name in users[entry.name]:  # a bad value is an error all the same
                    make_method(TOPUPS, name, "topup_args", {entry.name: value})
                others = ", ".join(f"topup={name!r}" for name in users[entry.name])
                logger.warning(
                    f"{entry.name}={value!r} has no effect: the top-up {self.topup!r} does not use it, but {others} does."
                )

    def to_dict(self) -> dict[str, Any]:
        """All fields and `quant_method`, JSON-serialisable; `from_dict` makes an equal config of it."""
        return {"quant_method": self.quant_method, **asdict(self)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs):
        """Makes a config from the dict that `to_dict` returns; keyword arguments that are fields override it.

        Raises:
            `ValueError`: the dict is another method's, or has keys that are not fields.
        """
        known = [entry.name for entry in fields(cls)]
        values = dict(config_dict)
        method = values.pop("quant_method", cls.quant_method)
        if method != cls.quant_method:
            raise ValueError(f"This is the config of {method!r}, not of {cls.quant_method!r}.")
        for key in values:
            if key not in known:
                raise ValueError(f"NeuronALConfig has no field {key!r}.{did_you_mean(key, known)}")
        values |= {key: kwargs.pop(key) for key in list(kwargs) if key in known}
        config = cls(**values)
        return (config, kwargs) if return_unused_kwargs else config


def _check_int(name: str, value: Any, smallest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}: expected a whole number.")
    if value < smallest:
        raise ValueError(f"{name} is {value}: expected at least {smallest}.")


def _checked_patterns(name: str, patterns: Any) -> list[str] | None:
    if patterns is None:
        return None
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{name} is {patterns!r}: expected a list of regular expressions, such as ['q_proj'].")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} holds {pattern!r}, which is no regular expression: {error}.") from error
    return list(patterns)
