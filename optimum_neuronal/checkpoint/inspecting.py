"""Reads from a checkpoint's files alone how it was pruned, and verifies that zeros, or codes of few bits, are there."""

import html
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..common.display import escaped, format_bytes, format_html, format_table
from ..model.weight_names import PrunedWeights, StoredProjection, natural_order, with_stars
from ..packed.formats.sparse import sparse_bytes
from .opening import Checkpoint, find_checkpoint
from .shares import LONGEST, Share, share_table
from .stored_weights import StoredWeight


@dataclass(repr=False)
class Inspection:
    """Facts of a checkpoint's files. `str()` gives a table, which notebooks show too; `to_dict()` is for JSON.

    Args:
        source (`str`): the directory or the Hub id.
        model_type (`str`): of the model.
        pruned (`bool`): True if its config.json has a sparsity_config.
        sparsity_config (`dict`): empty if there is none.
        format (`str`): `"dense"` or `"packed"`.
        files (`int`): with weights.
        stored_bytes, dense_bytes, packed_bytes (`int`): of all weights, as they are, dense and packed.
        pruned_bytes, pruned_numel (`int`): of the weights of pruned projections: bytes as stored, number of elements.
        total ([`Share`]): of all pruned projections.
        blocks, kinds (`dict[str, Share]`):
            By decoder block and by kind of projection. For a model that was not pruned, of all matrices in blocks.
        problems (`list[str]`): where the zeros do not agree with the sparsity_config.
        adapters (`list[str]`): names of the files of an adapter, which is not checked and which transformers loads too.
    """

    source: str
    model_type: str
    pruned: bool
    sparsity_config: dict[str, Any]
    format: str
    files: int
    stored_bytes: int = 0
    dense_bytes: int = 0
    packed_bytes: int = 0
    pruned_bytes: int = 0
    pruned_numel: int = 0
    total: Share = field(default_factory=Share)
    blocks: dict[str, Share] = field(default_factory=dict)
    kinds: dict[str, Share] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts, JSON-serialisable."""
        values = asdict(self)
        values["total"]["sparsity"] = self.total.sparsity
        values["bits_per_weight"] = self.bits_per_weight
        for group, shares in (("blocks", self.blocks), ("kinds", self.kinds)):
            for name, share in shares.items():
                values[group][name]["sparsity"] = share.sparsity
        return values

    def __repr__(self) -> str:
        found = f"{self.total.sparsity:.2%} zeros, {len(self.problems)} problems" if self.pruned else "not pruned"
        return f"Inspection({escaped(self.source)}, {self.format}, {found})"

    def __str__(self) -> str:
        return "\n\n".join([*(format_table(*table) for table in self._tables()), self.verdict])

    def _repr_html_(self) -> str:
        tables = [format_html(*table) for table in self._tables()]
        return "\n".join([*tables, f"<p>{html.escape(escaped(self.verdict))}</p>"])

    def _tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Return header and rows of each table."""
        rows = _about(self.sparsity_config) if self.pruned else [["pruned", "no: config.json has no sparsity_config"]]
        rows.append(["zeros found", f"{self.total.sparsity:.4%} of {self.total.weights:,} weights of projections"])
        files = "1 file" if self.files == 1 else f"{self.files} files"
        share = self.packed_bytes / self.dense_bytes if self.dense_bytes else 1.0
        stored, dense, packed = map(format_bytes, (self.stored_bytes, self.dense_bytes, self.packed_bytes))
        sizes = f"{stored} (dense {dense}, packed {packed}, {share:.2f} of it)"
        rows.append(["stored", f"{self.format}, {files}, {sizes}"])
        if self.pruned and (bits := self.bits_per_weight) is not None:
            rows.append(["bits a weight", f"{bits:.2f} in pruned projections, all that is stored counted"])
        about = ["", f"{self.source} ({self.model_type})"], rows
        parts = [("block", self.blocks), ("projection", self.kinds)]
        return [about, *(share_table(title, shares) for title, shares in parts if shares)]

    @property
    def bits_per_weight(self) -> float | None:
        """Bits that a weight of the pruned projections takes in the files, mask and scales included; None without any."""
        return 8 * self.pruned_bytes / self.pruned_numel if self.pruned_numel else None

    @property
    def verdict(self) -> str:
        """The last line of the text."""
        if not self.adapters:
            return self._verdict
        return (
            f"{self._verdict} NOT checked: {', '.join(self.adapters)}. transformers loads this adapter with the model, which "
            "then computes something else: remove it unless you trust it."
        )

    @property
    def _verdict(self) -> str:
        """The verdict on the weights."""
        if not self.pruned:
            return "Not pruned, so there is nothing to verify."
        if not self.problems:
            if self.sparsity_config.get("bits_per_weight") is not None and not self.total.coded:
                return "Quantised, but stored dense, so there are no codes to verify."
            what = "bits of the codes" if self.total.coded else "zeros"
            return f"Verified: the {what} agree with the sparsity_config."
        more = f"; and {len(self.problems) - 5} more." if len(self.problems) > 5 else "."
        return "NOT as recorded: " + "; ".join(self.problems[:5]) + more


def inspect_checkpoint(
    directory_or_id: str | Path, revision: str | None = None, token: str | None = None
) -> Inspection:
    """Read every weight of a checkpoint once, one at a time, and count the zeros. No model is loaded.

    Args:
        directory_or_id (`str` or `Path`): of a dense or packed checkpoint; one on the Hub is downloaded into the cache.
        revision, token (`str`, *optional*): for the Hub.

    Returns:
        [`Inspection`]: its `problems` name where the zeros do not agree with the sparsity_config.

    Raises:
        `ValueError`: the files or the sparsity_config are damaged.
        `OSError`: there is no such checkpoint.
    """
    checkpoint = Checkpoint(find_checkpoint(directory_or_id, revision, token))
    about = checkpoint.sparsity_config
    result = Inspection(
        source=str(directory_or_id),
        model_type=escaped(checkpoint.config.get("model_type", "unknown"), LONGEST),
        pruned=about is not None,
        sparsity_config=about or {},
        format=checkpoint.format,
        files=len(checkpoint.files),
        adapters=checkpoint.adapters,
    )
    places = None
    if about is not None:
        result.total.recorded, blocks = about["achieved_sparsity"], about.get("block_sparsity", {})
        result.blocks = {name: Share(recorded=blocks[name]) for name in sorted(blocks, key=natural_order)}
        kinds = about.get("projections", {})
        result.kinds = {
            kind: Share(recorded=found["sparsity"], recorded_bits=found.get("bits")) for kind, found in kinds.items()
        }
        places = PrunedWeights(about, [weight.name for weight in checkpoint.weights])
    for weight in logging.tqdm(checkpoint.weights, desc="Counting zeros", unit="weight", leave=False, disable=None):
        _count(weight, places.find(weight.name) if places else guess(weight), result)
    if about is not None:
        result.problems = _problems(result)
    return result


def guess(weight: StoredWeight) -> StoredProjection | None:
    """Return the place of a matrix in a model that was not pruned; the first number in its name is its block's."""
    parts = weight.name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    if number is None or len(weight.shape) < 2:
        return None
    kind = with_stars(".".join(parts[number + 1 :]))
    return StoredProjection(".".join(parts[: number + 1]), kind.removesuffix(".weight"))


def _count(weight: StoredWeight, place: StoredProjection | None, result: Inspection) -> None:
    """Add the counts of one weight to the result."""
    all_zeros = zeros = counted = row = 0
    for piece in weight.pieces():
        all_zeros += _zeros(piece)
        if place is not None and place.left_out:
            pruned = [part for index, part in enumerate(piece, row) if str(index) not in place.left_out]
            zeros, counted = zeros + sum(map(_zeros, pruned)), counted + sum(part.numel() for part in pruned)
            row += len(piece)
    if place is not None and not place.left_out:
        zeros, counted = all_zeros, weight.numel
    result.stored_bytes += weight.stored_bytes
    result.dense_bytes += weight.dense_bytes
    packed = weight.dense_bytes
    if weight.code_bits is not None:
        packed = weight.stored_bytes
    elif len(weight.shape) >= 2 and weight.dtype.is_floating_point:
        packed = sparse_bytes(weight.shape, weight.numel - all_zeros, weight.dtype.itemsize)
    result.packed_bytes += min(packed, weight.dense_bytes)
    if place is not None:
        result.pruned_bytes += weight.stored_bytes
        result.pruned_numel += weight.numel
        shares = result.blocks.setdefault(place.block, Share()), result.kinds.setdefault(place.kind, Share())
        for share in (result.total, *shares):
            share.zeros, share.weights = share.zeros + zeros, share.weights + counted
            if weight.code_bits is not None:
                share.coded, share.code_bits = share.coded + counted, share.code_bits + counted * weight.code_bits


def _zeros(tensor: torch.Tensor) -> int:
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8) & 0x7F  # which no comparison is made for; the other bit is the sign
    return int(np.count_nonzero((tensor == 0).numpy()))  # four times as fast as torch's count


def _problems(result: Inspection) -> list[str]:
    if not result.kinds or not result.blocks:
        return ["the sparsity_config does not name its blocks and projections, so nothing can be verified"]
    shares = [("the model", result.total), *result.blocks.items(), *result.kinds.items()]
    return [f"{escaped(name, LONGEST)} {problem}" for name, share in shares if (problem := share.problem())]


def _about(config: Mapping[str, Any]) -> list[list[str]]:
    """Return rows about how it was pruned."""
    own, rows = config.get("config", {}), []
    if methods := [_method(own, kind) for kind in ("saliency", "topup") if own.get(kind) is not None]:
        rows.append(["method", " + ".join(methods)])
    if config.get("bits_per_weight") is None:
        rows.append(["target", f"{config['sparsity']:.2%}, {config['achieved_sparsity']:.4%} achieved"])
    for title, bits in (("bits a weight", "bits_per_weight"), ("embeddings and head", "embedding_bits")):
        if config.get(bits) is not None:
            rows.append([title, f"quantised to {config[bits]:g} bits"])
    lambdas = {step: config.get(f"{step}_lambda") for step in ("block", "row")}
    if found := [f"{step} {value:g}" for step, value in lambdas.items() if value is not None]:
        rows.append(["lambda", ", ".join(found)])
    if calibration := config.get("calibration"):
        known = defaultdict(lambda: "?", calibration)
        rows.append(["calibration", "{num_samples} x {seq_length} tokens of {source}, seed {seed}".format_map(known)])
    if versions := config.get("versions"):
        rows.append(["made with", ", ".join(f"{name} {version}" for name, version in versions.items())])
    return [[title, escaped(text, LONGEST)] for title, text in rows]


def _method(config: Mapping[str, Any], kind: str) -> str:
    """Return the name of a saliency or top-up with its arguments."""
    arguments = ", ".join(f"{key}={value}" for key, value in (config.get(f"{kind}_args") or {}).items())
    return f"{config[kind]} ({arguments})" if arguments else config[kind]
