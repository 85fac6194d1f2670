"""A dry run: what a prune would do. It makes the same checks as a prune, but reads no weight."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..blocks.block_inputs import Call, Streams, called_blocks
from ..blocks.runner import BlockRunner
from ..common.device import default_device, time_on
from ..common.display import format_bytes, format_count, format_duration, format_table
from ..common.inference import inference
from ..compat import hf_private
from ..config.neuronal_config import NeuronALConfig
from ..model.load_model import check_unquantized, load_skeleton
from ..model.projections import Block, Decoder
from ..model.tokenizers import find_tokenizer
from .checks import check_prune, with_refit_dtype
from .prepare import draw_calibration, without_skipped
from .reporting import PackedSize, packed_size


REPEATS = 5  # of the timed block; the fastest counts
NOISY = 2.0  # ratio of the slowest to the fastest from which on the dry run says so


@dataclass(frozen=True, repr=False)
class DryRun:
    """What a prune would do. `print(dry_run)` shows it as a table."""

    decoder: Decoder
    config: NeuronALConfig
    size: PackedSize
    hidden_bytes: int  # of the calibration sequences' hidden states
    block_seconds: Sequence[float]  # of one block on one sequence, repeated; empty without calibration

    def __repr__(self) -> str:
        config, decoder, model = self.config, self.decoder, self.decoder.model
        weights = format_count(sum(weight.numel() for weight in model.parameters()))
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
        if self.block_seconds:
            rows.append(["hidden states", f"{format_bytes(self.hidden_bytes)}, beside the model"])
            rows.append(["one block, one sequence", self._block_time()])
        return format_table(["", "dry run"], rows)

    def _block_time(self) -> str:
        fastest, slowest = min(self.block_seconds), max(self.block_seconds)
        if slowest <= NOISY * fastest:
            return format_duration(fastest)
        return f"{format_duration(fastest)} to {format_duration(slowest)}: other work slows this machine down"


def dry_run(
    model_or_path: str | Path,
    config: NeuronALConfig,
    device: torch.device | None = None,
    tokenizer: Any = None,
    **options: Any,
) -> DryRun:
    """Return what a prune would do. Only the checkpoint's config and tokenizer are read.

    The calibration sequences are drawn, as a check of the data, and the largest block runs on the first one, with weights of
    zero.

    Args:
        model_or_path (`str` or `Path`): Hub id or directory of the dense model.
        config ([`NeuronALConfig`]): how to prune.
        device (`torch.device`, *optional*): where to time a block. None: the accelerator, or the CPU.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): for calibration text. None: the checkpoint's own.
        options: for [`load_skeleton`]: `dtype`, `revision`, `trust_remote_code`.

    Raises:
        `ValueError`, `TypeError`: the model, the data and the config do not fit together, as in a prune.
    """
    check_unquantized(model_or_path, options)
    model = load_skeleton(model_or_path, **options)
    hf_private.forget_quantization(model)  # the weights of GPT-OSS are dense once they are loaded
    decoder = check_prune(model, config, loaded=False)
    if config.refit_epochs:
        config = with_refit_dtype(config, decoder)
    hidden_bytes, seconds = 0, []
    if tokenizer is None and config.methods.needs_calibration:
        files = {name: value for name, value in options.items() if name != "dtype"}
        tokenizer = find_tokenizer(model_or_path, **files)
    calibration = draw_calibration(model, config, tokenizer, None, options.get("revision"))
    if calibration is not None:
        device = device or default_device()
        decoder = _without_skipped(decoder, device)
        streams = 2 if config.refit_epochs else 1  # the dense model's stream runs beside a refit
        hidden_bytes = streams * calibration.ids.numel() * decoder.config.hidden_size * model.dtype.itemsize
        seconds = _time_block(decoder, calibration.ids[:1], device)
    size = packed_size(decoder, lambda p: int(config.sparsity * p.numel))
    return DryRun(decoder, config, size, hidden_bytes, seconds)


def _without_skipped(decoder: Decoder, device: torch.device) -> Decoder:
    """Return a decoder on meta with only the blocks that text calls. To find them, a copy runs its first block."""
    copied = copy.deepcopy(decoder)
    inside = {module for block in copied.blocks for module in block.module.modules()}
    for module in copied.model.modules():
        if module not in inside:
            _allocate(module, device, recurse=False)
    copied.model.eval()
    with inference(copied.model):
        called, _ = called_blocks(copied, device, load=partial(_allocate, device=device))
    names = {block.name for block in called}
    return without_skipped(decoder, [block for block in decoder.blocks if block.name in names])


def _allocate(module: nn.Module, device: torch.device, recurse: bool = True) -> None:
    """Give a module on meta tensors of zeros, and with `recurse` its submodules too."""
    module.to_empty(device=device, recurse=recurse)
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        tensor.data.zero_()


def _time_block(decoder: Decoder, ids: torch.Tensor, device: torch.device) -> list[float]:
    """Return seconds of the largest block on one sequence, (1, tokens), several times."""
    runner, seconds = BlockRunner(_largest_block(decoder, device), 1, device), []

    def visit(index: int, block: Block, calls: Sequence[Call], streams: Streams) -> Streams:
        for _ in range(1 + REPEATS):
            start = time_on(device)
            runner.output(block, streams[0], calls)
            seconds.append(time_on(device) - start)
        return streams

    with inference(runner.decoder.model):
        runner.run(runner.capture(ids), 1, visit)
    return seconds[1:]  # the first one warms up


def _largest_block(decoder: Decoder, device: torch.device) -> Decoder:
    """Return a copy of a decoder on meta that runs only the block with the most pruned weights, all of them zero."""
    copied = copy.deepcopy(decoder)
    largest = max(copied.blocks, key=lambda block: block.numel)
    modules, _, index = largest.name.rpartition(".")
    # Blocks before it stay: some families compute each block by its index.
    del copied.model.get_submodule(modules)[int(index) + 1 :]
    _allocate(copied.model.eval(), device)
    return replace(copied, blocks=[largest])
