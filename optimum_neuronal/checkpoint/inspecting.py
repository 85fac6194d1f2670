"""Verifies that the zeros in a checkpoint's files match its sparsity_config."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..common.display import escaped, fold_rows, format_bytes, format_table
from ..compat import hf_private
from ..model.load_model import first_names, load_skeleton
from ..model.projections import with_stars
from ..model.sources import check_directory
from ..model.sparsity import PrunedWeights, StoredProjection, is_zero, natural_order, read_sparsity_config
from ..model.unread_formats import check_formats, quantization_of
from ..packed.packed_weight import PackedWeight, swapped
from ..report import calibration_text
from .hub import find_checkpoint
from .names import ADAPTER_CONFIG, CONFIG
from .packed_files import is_packed, read_json, read_weights, weight_files


LONGEST = 500  # characters of a text in config.json that are shown
MORE_ZEROS = 1e-4  # share of zeros beyond the record that may come from rounding to a smaller dtype


@dataclass
class Share:
    """Zeros counted in some weights, and what the sparsity_config records."""

    zeros: int = 0
    weights: int = 0
    recorded: float | None = None  # share of zeros
    expected: int | None = None  # weights

    @property
    def sparsity(self) -> float:
        """Share of zeros, in [0, 1]."""
        return self.zeros / self.weights if self.weights else 0.0

    def problem(self) -> str | None:
        """Return how the zeros differ from the record, or None."""
        if self.recorded is None:
            return None
        if not self.weights:
            return "has no weights in the files"
        if self.expected not in (None, self.weights):
            return f"has {self.weights:,} weights in the files instead of {self.expected:,}"
        missing = round(self.recorded * self.weights) - self.zeros
        if missing <= 0 and self.sparsity - self.recorded <= MORE_ZEROS:
            return None
        difference = f"{abs(missing):,} zeros {'fewer' if missing > 0 else 'more'} than recorded"
        return f"has {difference}: {self.sparsity:.6%} instead of {self.recorded:.6%}"


@dataclass(repr=False)
class Inspection:
    """What a checkpoint's files hold. `str()` gives tables."""

    source: str  # directory or Hub id
    model_type: str
    sparsity_config: dict[str, Any]  # empty if it was not pruned
    format: str  # "dense" or "packed"
    files: int  # files of weights
    stored_bytes: int = 0  # of all weights, as stored
    dense_bytes: int = 0  # of all weights, dense
    projection_bytes: int = 0  # of the projections that `total` counts, as stored
    projection_numel: int = 0  # their elements
    total: Share = field(default_factory=Share)  # of the pruned projections, or of all matrices in blocks
    blocks: dict[str, Share] = field(default_factory=dict)
    kinds: dict[str, Share] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # where weights and sparsity_config disagree
    has_adapter: bool = False  # transformers would load one with the model; it is not checked

    def __repr__(self) -> str:
        adapter = f" NOT checked: the adapter of {ADAPTER_CONFIG}, which transformers loads too. Remove it unless you trust it."
        verdict = self.verdict + (adapter if self.has_adapter else "")
        rows = _about(self.sparsity_config) if self.sparsity_config else [["pruned", "not recorded in config.json"]]
        rows.append(["zeros counted", f"{self.total.sparsity:.4%} of {self.total.weights:,} weights of projections"])
        files = "1 file" if self.files == 1 else f"{self.files} files"
        sizes = f"{format_bytes(self.stored_bytes)} (dense {format_bytes(self.dense_bytes)})"
        rows.append(["stored", f"{self.format}, {files}, {sizes}"])
        if self.projection_numel:
            bits = 8 * self.projection_bytes / self.projection_numel
            rows.append(["stored bits per weight", f"{bits:.2f} in projections, with masks"])
        tables = [format_table(["", f"{self.source} ({self.model_type})"], rows)]
        parts = [("block", self.blocks), ("projection", self.kinds)]
        return "\n\n".join([*tables, *(_table(title, shares) for title, shares in parts if shares), verdict])

    @property
    def verdict(self) -> str:
        """Whether the weights agree with the record."""
        if self.problems:
            expected = "recorded" if self.sparsity_config else "config.json says"
            return f"NOT as {expected}: {'; '.join(self.problems[:5])}{'; ...' if len(self.problems) > 5 else '.'}"
        if self.sparsity_config:
            return "Verified: the zeros agree with the sparsity_config."
        made = ", not recorded how they were made" if self.total.zeros else ""
        return f"{self.total.sparsity:.2%} zeros{made}: there is nothing to verify."


def inspect_checkpoint(
    directory_or_id: str | Path, revision: str | None = None, token: str | None = None
) -> Inspection:
    """Read every weight of a checkpoint, one at a time, and compare the zeros with the record. No model is loaded.

    Args:
        directory_or_id (`str` or `Path`): a dense or packed checkpoint; one on the Hub is downloaded into the cache.
        revision, token (`str`, *optional*): for the Hub.

    Returns:
        [`Inspection`]: its `problems` name where the weights do not agree with the sparsity_config.

    Raises:
        `ValueError`: the files or the sparsity_config are damaged.
        `OSError`: the checkpoint cannot be found.
    """
    directory = find_checkpoint(directory_or_id, revision, token)
    check_directory(directory)
    config = read_json(directory / CONFIG)
    packed, about = is_packed(config), read_sparsity_config(config)
    quantization = quantization_of(config, directory)
    result = Inspection(
        source=str(directory_or_id),
        model_type=escaped(config.get("model_type", "unknown"), LONGEST),
        sparsity_config=about or {},
        format="packed" if packed else "dense",
        files=len(weight_files(directory, packed)),
        has_adapter=(directory / ADAPTER_CONFIG).exists(),
    )
    places = None
    if about is not None:
        result.total.recorded, blocks = about["achieved_sparsity"], about.get("block_sparsity", {})
        result.blocks = {name: Share(recorded=blocks[name]) for name in sorted(blocks, key=natural_order)}
        projections = about.get("projections", {})
        result.kinds = {
            kind: Share(recorded=entry["sparsity"], expected=entry.get("numel")) for kind, entry in projections.items()
        }
        places = PrunedWeights(about)
    weights, found = read_weights(directory, packed), {}
    for name, weight, header in logging.tqdm(weights, desc="Counting zeros", unit="weight", leave=False, disable=None):
        check_formats([name], directory)
        dense = weight if header is None else weight.to_dense().view(swapped(header.shape, header.transposed))
        found[name] = header or weight
        place = places.find(name) if places else _guess(name, dense.ndim)
        if place is not None and not dense.is_floating_point():
            raise ValueError(
                f"{name} has the dtype {dense.dtype}: the checkpoint is quantized ({quantization}), and its zeros cannot be "
                "counted. Inspect the model from before it was quantized."
            )
        _count(weight, dense, place, result)
    if about is not None:
        shares = [("the model", result.total), *result.blocks.items(), *result.kinds.items()]
        result.problems = [f"{escaped(name, LONGEST)} {why}" for name, share in shares if (why := share.problem())]
    with suppress(Exception):  # transformers does not load the model
        lacking, _ = hf_private.match_names(load_skeleton(directory, trust_remote_code=False), found)
        if lacking and (packed or quantization is None):
            result.problems.append(f"transformers does not find {first_names(lacking)} in the files")
    return result


def _guess(name: str, dimensions: int) -> StoredProjection | None:
    """Return the projection of a matrix in a model without a record; the first number in its name is its block's."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is None or dimensions not in (2, 3) or name.endswith("bias"):  # old GPT-2s have a causal mask of four
        return None
    kind = with_stars(".".join(parts[number + 1 :]))
    return StoredProjection(".".join(parts[: number + 1]), kind.removesuffix(".weight"))


def _count(
    weight: torch.Tensor | PackedWeight, dense: torch.Tensor, place: StoredProjection | None, result: Inspection
) -> None:
    stored = sum(t.nbytes for t in weight.stored().values()) if isinstance(weight, PackedWeight) else weight.nbytes
    result.stored_bytes += stored
    result.dense_bytes += dense.nbytes
    if place is None:
        return
    result.projection_bytes += stored
    result.projection_numel += dense.numel()
    if place.left_out:
        dense = dense[[index for index in range(len(dense)) if str(index) not in place.left_out]]
    counted, zeros = dense.numel(), int(is_zero(dense).sum())
    shares = result.blocks.setdefault(place.block, Share()), result.kinds.setdefault(place.kind, Share())
    for share in (result.total, *shares):
        share.zeros, share.weights = share.zeros + zeros, share.weights + counted


def _table(title: str, shares: Mapping[str, Share]) -> str:
    rows = []
    for name, share in shares.items():
        recorded = "-" if share.recorded is None else f"{share.recorded:.2%}"
        rows.append([escaped(name, LONGEST), f"{share.weights:,}", recorded, f"{share.sparsity:.2%}"])
    rows = fold_rows(rows) if title == "block" else rows
    return format_table([title, "weights", "recorded", "counted"], rows)


def _about(sparsity_config: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table that say how a model was pruned."""
    method = sparsity_config.get("method")
    rows = [["method", method]] if method else []
    rows.append(["target", f"{sparsity_config['sparsity']:.2%}, {sparsity_config['achieved_sparsity']:.4%} achieved"])
    if calibration := sparsity_config.get("calibration"):
        rows.append(["calibration", calibration_text(calibration)])
    return [[title, escaped(text, LONGEST)] for title, text in rows]
