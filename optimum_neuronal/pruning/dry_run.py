"""A dry run: what a pruning run would do. It makes the same checks, but reads no weight."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.display import format_bytes, format_table
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..model.load_model import check_unquantized, load_skeleton
from ..model.origin import find_tokenizer
from ..model.projections import Decoder
from ..model.sources import Source, locate
from ..model.sparsity import PackedSize, packed_size
from .prepare import check_prune, draw_calibration, find_refit_dtype


@dataclass(frozen=True, repr=False)
class DryRun:
    """What a pruning run would do. `print(dry_run)` shows it as a table."""

    decoder: Decoder
    config: NeuronALConfig
    tokenizer: Any  # None if the checkpoint has none
    size: PackedSize
    hidden_bytes: int  # of the calibration sequences' hidden states; 0 without calibration

    def __repr__(self) -> str:
        config, decoder, model = self.config, self.decoder, self.decoder.model
        weights = f"{sum(weight.numel() for weight in model.parameters()):,}"
        in_memory = model.get_memory_footprint()
        packed, dtype = format_bytes(in_memory - self.size.dense + self.size.saved), str(model.dtype)
        blocks = sum(bool(block.pruned) for block in decoder.blocks)
        projections = f"{len(decoder.projections):,} projections in {blocks} blocks"
        rows = [
            ["model", f"{model.config.model_type}, {weights} weights"],
            ["method", config.methods.title],
            ["pruned", f"{projections}: {config.sparsity:.2%} zeros"],
            [f"size in {dtype.removeprefix('torch.')}", f"{format_bytes(in_memory)}, packed {packed}"],
        ]
        if self.hidden_bytes:
            rows.append(["hidden states", f"{format_bytes(self.hidden_bytes)}, beside the model"])
        return format_table(["", "dry run"], rows)


def dry_run(model_or_path: str | Path | Source, config: NeuronALConfig, **options: Any) -> DryRun:
    """Return what a pruning run would do. Only the checkpoint's config and tokenizer are read.

    The calibration sequences are drawn, as a check of the data. Blocks that text skips are counted: no block runs.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model.
        config ([`NeuronALConfig`]): how to prune.
        options: for [`load_skeleton`]: `dtype`, `revision`, `trust_remote_code`.

    Raises:
        `ValueError`, `TypeError`: the model, the data and the config do not fit together, as in a pruning run.
    """
    source = locate(model_or_path, options)
    check_unquantized(source)
    model = load_skeleton(source, source.options.get("dtype", "auto"))
    hf_private.forget_quantization(model)  # the weights of GPT-OSS are dense once they are loaded
    decoder = check_prune(model, config, loaded=False)
    find_refit_dtype(config, decoder)  # raises for one that does not fit the weights
    tokenizer, hidden_bytes = find_tokenizer(source), 0
    calibration = draw_calibration(model, config, tokenizer, None, source.options.get("revision"))
    if calibration is not None:
        streams = 2 if config.refit_epochs else 1  # the dense model's stream runs beside a refit
        hidden_bytes = streams * calibration.ids.numel() * decoder.config.hidden_size * model.dtype.itemsize
    size = packed_size(decoder, lambda p: int(config.sparsity * p.numel))
    return DryRun(decoder, config, tokenizer, size, hidden_bytes)
