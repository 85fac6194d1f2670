"""`prepare`: checks model and config, draws the calibration data, and returns all that the steps of a pruning run share."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..blocks.block_inputs import called_blocks
from ..blocks.runner import BlockRunner
from ..common.notes import get_logger
from ..common.processes import Processes
from ..common.torch_state import (
    UNLIMITED,
    MemoryLimits,
    default_batch_size,
    inference,
    multiplies_bfloat16,
    reset_peak_memory,
)
from ..compat import hf_private
from ..config.neuronal_config import Methods, NeuronALConfig
from ..data.calibration import EXTRA_WINDOWS, draw_windows
from ..data.token_windows import (
    TokenWindows,
    as_token_ids,
    mix,
    padding_ids,
    resolve_bos,
    resolve_seq_length,
    take_sequences,
)
from ..files.records import Records, checksum, checksum_ids, versions
from ..model.find_blocks import check_kind, count_packed, find_decoder
from ..model.origin import own_tokenizer
from ..model.projections import Decoder, Projection, patterns_of
from ..model.sparsity import SPARSE, measure_sparsity, read_sparsity_config
from ..saliency.plan import ColumnPattern
from ..trials import Cache, PlanEvaluator


logger = get_logger(__name__)

BFLOAT16_WIDTH = 512  # hidden size from which a CPU runs a block about twice as fast with bfloat16 products
ACCELERATOR_TOKENS = 8192  # tokens per forward of a block on an accelerator: fewer would leave it idle
# Devices on which sequences run one at a time: kernels for more rows may round differently, and gain little.
ONE_AT_A_TIME = ("cpu",)


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
    """One pruning run: the dense model, how to prune it, and what the steps share."""

    evaluator: PlanEvaluator  # of the model and all calibration sequences
    config: NeuronALConfig
    calibration: TokenWindows | None  # None if saliency and top-up look at weights alone
    tokenizer: PreTrainedTokenizerBase | None
    clock: Clock
    dataset: Any = None  # passed by the user instead of the config's
    refit_dtype: str | None = None  # in which a refit multiplies, see [`find_refit_dtype`]

    @property
    def methods(self) -> Methods:
        return self.config.methods

    @property
    def decoder(self) -> Decoder:
        return self.evaluator.decoder

    @property
    def model(self) -> PreTrainedModel:
        return self.decoder.model


def prepare(
    model: PreTrainedModel,
    config: NeuronALConfig,
    dataset: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    folder: Path | None = None,
    cache: Cache | None = None,
    memory: MemoryLimits = UNLIMITED,
    further: bool = False,
) -> PruneContext:
    """Check model, config and data, and return the context of a pruning run. No weight is changed.

    Args:
        model (`PreTrainedModel`): the dense model.
        config ([`NeuronALConfig`]): how to prune.
        dataset (*optional*): calibration data instead of the config's, see [`draw_calibration`].
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for calibration text. None: the model's own.
        folder (`Path`, *optional*): where finished steps and blocks are recorded, so that the run can resume.
        cache ([`Cache`], *optional*): measurements of other runs with the same calibration sequences.
        memory ([`MemoryLimits`]): for sequences that run through the blocks.
        further (`bool`): True to prune a model further that this package has pruned.

    Raises:
        `ValueError`, `TypeError`: model, data and config do not fit together, or the records belong to another run.
    """
    reset_peak_memory()
    clock = Clock()
    decoder = check_prune(model, config, further=further)
    refit_dtype = find_refit_dtype(config, decoder)
    calibration = draw_calibration(model, config, tokenizer, dataset)
    tokenizer = tokenizer or (calibration and calibration.tokenizer)
    if tokenizer is None:  # token ids, or no text at all
        with suppress(ValueError):
            tokenizer = own_tokenizer(model)
    clock.lap("calibration data")
    cache = cache or Cache()
    device = hf_private.execution_device(model.get_input_embeddings())
    decoder = without_skipped_blocks(decoder, device, cache)
    processes, ids = Processes.current(), ids_of(calibration)
    values = config.to_dict() | {"refit_dtype": refit_dtype}
    started_with = {} if folder is None else {**values, **identity(decoder, ids), "versions": versions()}
    batch_size = memory.batch_size or default_batch_size(ids.shape[1], ACCELERATOR_TOKENS)
    runner = BlockRunner(
        decoder,
        batch_size=1 if device.type in ONE_AT_A_TIME else batch_size,
        device=device,
        max_hidden_bytes=memory.max_hidden_bytes,
        quiet=processes.rank > 0,
    )
    evaluator = PlanEvaluator(
        runner=runner,
        saliency=config.methods.saliency,
        ids=ids,
        num_alignment_samples=config.num_alignment_samples,
        pattern=config.methods.pattern,
        min_expert_tokens=config.min_expert_tokens,
        records=Records(folder, started_with, processes),
        cache=cache,
    )
    passed = None if isinstance(dataset, TokenWindows) else dataset
    return PruneContext(evaluator, config, calibration, tokenizer, clock, passed, refit_dtype)


def check_prune(model: PreTrainedModel, config: NeuronALConfig, loaded: bool = True, further: bool = False) -> Decoder:
    """Return the decoder of a model. Raise if the config does not fit it, or if the model is sparse already.

    `loaded=False`: weights may be on meta. `further`: a model that this package has pruned may be pruned further.
    """
    check_prunable(model, further)
    decoder = find_decoder(model, config.targets, config.ignore)
    topup = config.methods.topup
    if topup.compares_outputs and not decoder.predicts_next_token:
        raise ValueError(
            f"The top-up {topup.name!r} compares next-token distributions, but {type(model).__name__} has no causal "
            "language-model head. Choose 'neuronal', which compares activations."
        )
    _check_pattern(decoder.projections, config.methods.pattern)
    if config.methods.needs_calibration:
        resolve_seq_length(model.config, config.seq_length)
    if loaded:
        check_weights(model, decoder.projections)
        if not further and (zeros := measure_sparsity(decoder).achieved) > SPARSE:
            raise _already_sparse(model, f"{zeros:.2%} of the weights of its projections are zero")
    return decoder


def _already_sparse(model: PreTrainedModel, why: str) -> ValueError:
    name = model.config.name_or_path or "The model"
    return ValueError(f"{name} is already sparse: {why}. Prune the dense model, or fine-tune this one.")


def check_prunable(model: PreTrainedModel, further: bool = False) -> None:
    """Raise `TypeError` or `ValueError` for a model that cannot be pruned, whatever its weights are."""
    inner = hf_private.uncompiled(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"Expected a transformers PreTrainedModel, got {type(model).__name__}.")
    if inner is not model or hf_private.has_compiled_parts(model):
        raise ValueError("The model or a part of it is compiled: load it again, prune it, and compile it afterwards.")
    if hasattr(model, "peft_config") or any(hasattr(module, "get_base_layer") for module in model.modules()):
        raise ValueError("The model has PEFT layers: call merge_and_unload() first, or load it again without.")
    if count_packed(model):
        raise _already_sparse(model, "its weights are packed")
    if hf_private.is_quantized(model):
        raise ValueError("The model is quantized: prune the original model, then quantize the sparse one.")
    check_kind(type(model), model.config)
    if not further and read_sparsity_config(model.config) is not None:
        raise _already_sparse(model, "its config has a sparsity_config")


def _check_pattern(projections: Mapping[str, Projection], pattern: ColumnPattern | None) -> None:
    if pattern is None:
        return
    if wrong := {name: p.shape[1] for name, p in projections.items() if p.shape[1] % pattern.group}:
        name, features = next(iter(wrong.items()))
        raise ValueError(
            f"{name} has {features} input features, not a multiple of {pattern.group}, so the pattern {pattern} does not fit. "
            f"Leave out all such projections with ignore={patterns_of(wrong, projections)}."
        )


def check_weights(model: PreTrainedModel, projections: Mapping[str, Projection]) -> None:
    """Raise `ValueError` unless every projection has its own finite floating-point weights."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError("The weights were created under torch.inference_mode: load or copy the model outside of it.")
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            names.setdefault(parameter.data_ptr(), []).append(name)
    alike = {name: () if p.owner.is_meta else names[p.owner.data_ptr()] for name, p in projections.items()}
    if shared := {name: members for name, members in alike.items() if len(members) > 1}:
        raise ValueError(
            f"{' and '.join(next(iter(shared.values())))} share their weights: leave out all such projections with "
            f"ignore={patterns_of(shared, projections)}."
        )
    for name, projection in projections.items():
        weight = projection.owner
        if hf_private.is_offloaded(projection.module):
            continue
        if weight.is_meta:
            raise ValueError(
                f"The weights of {name} are on the meta device: load them with from_pretrained. device_map and "
                "offload_folder can leave them on disk."
            )
        if not bool(torch.isfinite(projection.weight).all()):
            raise ValueError(f"The weights of {name} contain NaN or infinity: the checkpoint is damaged.")


def find_refit_dtype(config: NeuronALConfig, decoder: Decoder) -> str | None:
    """Return the dtype in which a refit of float32 weights multiplies; None for other weights."""
    if not config.refit_epochs:
        return config.refit_dtype
    projections = decoder.projections.values()
    weights_dtype = str(next(iter(projections)).owner.dtype).removeprefix("torch.")
    if weights_dtype != "float32":
        if config.refit_dtype not in (None, weights_dtype):
            raise ValueError(
                f"refit_dtype is {config.refit_dtype!r}, but the weights are {weights_dtype}: leave it out, or load the model in float32."
            )
        return None  # blocks compute in the weights' own dtype, without autocast
    on_cpu = all(hf_private.execution_device(p.module).type == "cpu" for p in projections)
    gains = on_cpu and decoder.config.hidden_size >= BFLOAT16_WIDTH and multiplies_bfloat16(torch.device("cpu"))
    return config.refit_dtype or ("bfloat16" if gains else "float32")


def without_skipped_blocks(decoder: Decoder, device: torch.device, cache: Cache) -> Decoder:
    """Return a decoder without the blocks that text does not run through, with a warning, once for a cache."""
    with inference(decoder.model):
        called, _ = called_blocks(decoder, device)
    skipped = [block.name for block in decoder.blocks if block not in called]
    if skipped:
        named = f"{len(skipped)} of {len(decoder.blocks)} blocks ({', '.join(skipped)})"
        text = f"Text skips {named}: their projections are not pruned."
        cache.once("text skips blocks", partial(logger.warning, text))
    decoder = replace(decoder, blocks=called)
    if not decoder.projections:
        raise ValueError("No projection is left to prune: text skips all blocks that targets and ignore allow.")
    return decoder


def ids_of(calibration: TokenWindows | None) -> torch.Tensor:
    """Return calibration sequences, int64, shape (num_samples, seq_length); shape (0, 0) without calibration."""
    return torch.empty(0, 0, dtype=torch.int64) if calibration is None else calibration.ids


def draw_calibration(
    model: PreTrainedModel,
    config: NeuronALConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: Any = None,
    revision: str | None = None,
) -> TokenWindows | None:
    """Return the calibration sequences of a config, or of another dataset; None if the methods look at weights alone.

    Several datasets of a config take turns, so that the first sequences hold all of them.
    """
    if not config.methods.needs_calibration:
        return None
    if isinstance(dataset, TokenWindows):  # drawn before the weights were loaded
        return dataset
    datasets = config.dataset_names if dataset is None else [dataset]
    if not datasets:
        raise ValueError(
            "No calibration data: name a dataset (NeuronALConfig(dataset=...), --dataset), or pass prune(model, dataset=...) "
            "text or token ids."
        )
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = as_token_ids(dataset, config.seq_length, padding_ids(model.config, tokenizer))
    if ids is not None:
        resolve_seq_length(model.config, ids.shape[1])
        return take_sequences(ids, config.num_samples, vocab_size)
    tokenizer = tokenizer or own_tokenizer(model, revision)
    how = {
        "seq_length": resolve_seq_length(model.config, config.seq_length),
        "seed": config.seed,
        "vocab_size": vocab_size,
        "sampling": config.sampling,
        "bos": resolve_bos(model.config, tokenizer, config.add_bos),
    }
    draw = partial(draw_windows, tokenizer=tokenizer, **how)
    return mix(datasets, config.num_samples, EXTRA_WINDOWS, lambda one, count: draw(one, num_samples=count))


def identity(decoder: Decoder, ids: torch.Tensor) -> dict[str, str]:
    """Return checksums of model and calibration data, and the device: a pruning run is resumed only if they are equal."""
    return {
        "model": checksum(decoder.model, list(decoder.projections)),
        "calibration data": checksum_ids(ids),
        "device": hf_private.execution_device(next(iter(decoder.projections.values())).module).type,
    }
