"""`check`: the one check of model and config before any long work. It makes the context that every step receives."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..blocks.runner import BlockRunner
from ..checkpoint.sparsity_config import KEY
from ..common.machine import Processes, multiplies_bfloat16
from ..common.validation import check_count
from ..compat import hf_private
from ..compat.hf_private import execution_device, is_offloaded
from ..config.neuronal_config import Methods, NeuronALConfig
from ..data.calibration import CalibrationSet, resolve_seq_length
from ..files.records import Records
from ..model.find_blocks import check_kind, find_decoder
from ..model.projections import Decoder, Projection
from ..saliency.plan import ColumnPattern
from ..trials import Cache
from .final_pass import LABEL as PRUNING


_in_use: set[nn.Parameter] = set()
_lock = threading.Lock()

TOKENS_PER_FORWARD = 2048  # enough to keep a processor busy, and no more memory than one of the paper's sequences
LAUNCHED = 8192  # tokens per forward of a block on an accelerator: fewer would leave it idle
# Devices on which sequences run one at a time: kernels for more rows may round differently, and gain little.
ONE_AT_A_TIME = ("cpu",)
WIDE = 512  # hidden size from which a block runs twice as fast with bfloat16 products on the CPU's matrix units


class Clock:
    """Wall time of consecutive phases."""

    def __init__(self):
        self.seconds: dict[str, float] = {}  # phase that has ended -> its seconds
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """End a phase, or a part of it, and begin the next one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True, eq=False)
class PruneContext:
    """One prune: the dense model, how to prune it, and what its steps share."""

    decoder: Decoder
    config: NeuronALConfig
    calibration: CalibrationSet | None = None  # None if saliency and top-up look at weights alone
    clock: Clock = field(default_factory=Clock)
    records: Records = field(default_factory=lambda: Records(processes=Processes.current()))
    cache: Cache = field(default_factory=Cache)  # shared by prunes with the same calibration sequences
    batch_size: int | None = None
    max_hidden_bytes: int | None = None

    @property
    def methods(self) -> Methods:
        return self.config.methods

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model

    @property
    def ids(self) -> torch.Tensor:
        """Calibration sequences, int64, shape (num_samples, seq_length); shape (0, 0) without calibration."""
        return torch.empty(0, 0, dtype=torch.int64) if self.calibration is None else self.calibration.ids

    def runner(self) -> BlockRunner:
        device = execution_device(self.model.get_input_embeddings())
        batch_size = self.batch_size or default_batch_size(self.ids.shape[1], LAUNCHED)
        if device.type in ONE_AT_A_TIME:
            batch_size = 1
        # Labels of the steps. None stands for the top-up, which has labels of its own.
        steps = (None, PRUNING) if self.methods.topup.decides else (PRUNING,)
        quiet = self.records.processes.rank > 0
        return BlockRunner(self.decoder, batch_size, device, self.max_hidden_bytes, quiet, steps)


def default_batch_size(tokens: int, most: int = TOKENS_PER_FORWARD) -> int:
    """Return the number of sequences of this many tokens in a forward pass of `most` tokens, unless the user sets it."""
    return max(1, most // max(1, tokens))


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Keep other threads from pruning this model, or one that shares weights with it: they would see trial weights."""
    own = set(model.parameters())
    with _lock:
        if own & _in_use:
            raise RuntimeError("Another thread is pruning this model: wait until it has finished, or prune a copy.")
        _in_use.update(own)
    try:
        yield
    finally:
        with _lock:
            _in_use.difference_update(own)


def check(
    model: PreTrainedModel,
    config: NeuronALConfig,
    batch_size: int | None = None,
    max_hidden_bytes: int | None = None,
    loaded: bool = True,
) -> PruneContext:
    """Return the context. Raise if the config does not fit the model; `loaded=False`: weights may be on meta."""
    for name, value, least in (("batch_size", batch_size, 1), ("max_hidden_bytes", max_hidden_bytes, 0)):
        if value is not None:
            check_count(name, value, least)
    check_model(model)
    check_not_sparse(model)
    decoder = find_decoder(model, config.targets, config.ignore)
    methods = config.methods
    methods.topup.suited_to(decoder)
    check_pattern(decoder.projections, methods.pattern)
    resolve_seq_length(model.config, config.seq_length)
    if loaded:
        check_weights(model, decoder.projections)
    config = with_refit_dtype(config, decoder)
    return PruneContext(decoder, config, batch_size=batch_size, max_hidden_bytes=max_hidden_bytes)


def with_refit_dtype(config: NeuronALConfig, decoder: Decoder) -> NeuronALConfig:
    """Return a config that names the dtype of a refit of float32 weights, for the report and for a resumed prune."""
    if not config.refit_epochs:
        return config
    projections = decoder.projections.values()
    own = str(next(iter(projections)).owner.dtype).removeprefix("torch.")
    if own != "float32":
        if config.refit_dtype not in (None, own):
            raise ValueError(
                f"refit_dtype is {config.refit_dtype!r}, but the weights are {own}: leave it out, or load the model in float32."
            )
        return replace(config, refit_dtype=None)  # blocks compute in the weights' own dtype, without autocast
    on_cpu = all(execution_device(p.module).type == "cpu" for p in projections)
    gains = on_cpu and decoder.config.hidden_size >= WIDE and multiplies_bfloat16()
    return replace(config, refit_dtype=config.refit_dtype or ("bfloat16" if gains else "float32"))


def check_model(model: PreTrainedModel) -> None:
    """Raise `TypeError` or `ValueError` for a model that cannot be pruned, whatever its weights are."""
    if hasattr(model, "peft_config"):
        raise ValueError("The model has PEFT adapters: merge them first with model.merge_and_unload().")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    check_dense(model, "to prune it")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    check_kind(type(model), model.config)


def check_not_sparse(model: PreTrainedModel) -> None:
    if getattr(model.config, KEY, None) is not None:
        raise ValueError(
            f"{model.config.name_or_path or 'The model'} is already sparse: its config has a sparsity_config. Load the dense "
            "model; or, to prune further in Python, del model.config.sparsity_config first."
        )


def check_dense(model: nn.Module, purpose: str) -> None:
    """Raise `ValueError` if a model holds packed modules. `purpose`, such as `"to prune it"`, ends the message."""
    count = sum(name.rpartition(".")[2] == "packed_mask" for name, _ in model.named_buffers())
    if count:
        raise ValueError(
            f"The model holds {count} packed weights: call optimum_neuronal.densify(model) first {purpose}."
        )


def check_weights(model: PreTrainedModel, projections: Mapping[str, Projection]) -> None:
    """Raise `ValueError` unless every projection has its own finite floating-point weights."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter.data_ptr(), []).append(name)
    for name, projection in projections.items():
        weight = projection.owner
        if is_offloaded(projection.module):
            continue
        if weight.is_meta:
            raise ValueError(
                f"The weights of {name} are on the meta device: load them with from_pretrained. device_map and "
                "offload_folder can leave them on disk."
            )
        alike = names.get(weight.data_ptr(), ())
        if len(alike) > 1:
            raise ValueError(f"{' and '.join(alike)} share their weights: leave them out with ignore.")
        check_finite(name, projection.weight)


def check_finite(name: str, weight: torch.Tensor) -> None:
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"The weights of {name} contain NaN or infinity: the checkpoint is damaged.")


def check_pattern(projections: Mapping[str, Projection], pattern: ColumnPattern | None) -> None:
    """Raise `ValueError` unless the groups of an N:M pattern fit into the rows of every projection."""
    for name, projection in projections.items():
        features = projection.shape[1]
        if pattern is not None and features % pattern.group:
            raise ValueError(
                f"{name} has {features} input features, not a multiple of {pattern.group}, so the pattern {pattern} does "
                f"not fit. Leave it out with ignore=[{re.escape(name)!r}]."
            )
