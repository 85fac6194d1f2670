"""How sparse a model is: by the zeros in its weights, and by the `sparsity_config` in its config.json (docs/format.md)."""

import copy
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from huggingface_hub.dataclasses import validate_typed_dict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from ..common.display import escaped
from ..common.notes import get_logger
from ..compat import hf_private
from .change import Change, packed_bytes
from .find_blocks import count_packed, find_all_projections
from .projections import Decoder, Projection, by_owner, every_projection, kind_of, stored_names, with_stars


logger = get_logger(__name__)

KEY = "sparsity_config"
METHOD = "neuronal"  # its quant_method, by which this package knows its own
VERSION = 1
MOST = 5000  # blocks, kinds of projections and names of weights; more come from a damaged or hostile config
# A model is sparse if a larger share of its projections' weights is zero. Models that were quantized to 4 bits and back have
# less: measured up to 20%, which depends on the grid.
SPARSE = 0.25

Number = int | float


class Sparsity(NamedTuple):
    """Shares of zeros in pruned projections."""

    achieved: float  # in all of them
    blocks: dict[str, float]
    projections: dict[str, dict[str, float]]  # `sparsity`, `smallest_row` and `largest_row` of each


def is_zero(weight: torch.Tensor) -> torch.Tensor:
    """Return booleans of a weight's shape, True where it is 0.0 or -0.0."""
    return (weight.float() if weight.itemsize == 1 else weight) == 0  # torch does not compare float8


@torch.no_grad()
def measure_sparsity(decoder: Decoder, changes: Mapping[str, Change] | None = None) -> Sparsity:
    """Return the shares of zeros, with `changes` made, in the projections to prune. Offloaded weights are read."""
    changes = changes or {}
    projections: dict[str, dict[str, float]] = {}
    zeros: dict[str, int] = {}
    for block in decoder.blocks:
        for first, *others in by_owner(block.pruned):
            owner = first.owner.data
            if hf_private.is_offloaded(first.module):
                owner = hf_private.offload_hook(first.module).weights_map[first.parameter]
            for projection in (first, *others):
                change, weight = changes.get(projection.name), projection.view(owner)
                counts = is_zero(weight if change is None else change.applied(weight)).sum(dim=1).cpu()
                rows = counts.double() / projection.shape[1]
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                zeros[block.name] = zeros.get(block.name, 0) + int(counts.sum())
    blocks = {block.name: zeros[block.name] / block.numel for block in decoder.blocks if block.pruned}
    return Sparsity(sum(zeros.values()) / sum(block.numel for block in decoder.blocks), blocks, projections)


@dataclass(frozen=True)
class PackedSize:
    """Bytes of pruned weights. A weight that is not smaller when packed counts as dense."""

    dense: int
    saved: int  # in the packed format
    weights: int  # number of weights

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in the packed format: mask and values."""
        return 8 * self.saved / self.weights


def packed_size(decoder: Decoder, zeros: Callable[[Projection], int]) -> PackedSize:
    """Return the size of a decoder's pruned weights, which may be on the meta device. `zeros` counts a projection's."""
    dense = saved = weights = 0
    for projections in by_owner(decoder.projections.values()):
        owner, columns = projections[0].owner, projections[0].shape[1]
        size, shape = owner.numel() * owner.element_size(), (owner.numel() // columns, columns)
        packed = packed_bytes(shape, owner.numel() - sum(map(zeros, projections)), owner.element_size())
        dense, saved, weights = dense + size, saved + min(size, packed), weights + owner.numel()
    return PackedSize(dense, saved, weights)


class _SparsityConfig(TypedDict, total=False):
    """What this package reads."""

    method: str
    sparsity: Number
    achieved_sparsity: Number
    block_sparsity: dict[str, Number]
    projections: dict[str, dict]
    left_out: list[str]
    config: dict
    calibration: dict
    base_model: str | None


class _Projection(TypedDict):
    sparsity: Number
    weights: list[str]
    numel: int | None


def read_sparsity_config(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the checked sparsity_config of a config, or of the content of config.json; None without one of this package."""
    value = config.get(KEY) if isinstance(config, Mapping) else getattr(config, KEY, None)
    if not isinstance(value, Mapping) or value.get("quant_method") != METHOD:
        if value is not None:
            logger.warning_once(f"The {KEY} of another tool is ignored: {escaped(value, 80)}")
        return None
    version = value.get("version")
    if type(version) is not int or version != VERSION:  # neither true nor 1.0
        raise ValueError(
            f"{KEY} has the version {escaped(version, 80)}: expected {VERSION}. Save the model with this release again."
        )
    if missing := {"sparsity", "achieved_sparsity"} - value.keys():
        raise ValueError(f"{KEY} has no {min(missing)!r}: save the model again.")
    blocks, projections = value.get("block_sparsity", {}), value.get("projections", {})
    try:
        validate_typed_dict(
            _SparsityConfig, {key: value[key] for key in _SparsityConfig.__annotations__ if key in value}
        )
        entries = list(projections.values())[: MOST + 1]
        for entry in entries:
            validate_typed_dict(_Projection, {key: entry.get(key) for key in _Projection.__annotations__})
    except StrictDataclassError as error:
        raise ValueError(f"{KEY} is damaged: {textwrap.shorten(str(error), 300)}. Save the model again.") from error
    if len(blocks) + sum(1 + len(entry["weights"]) for entry in entries) > MOST:
        raise ValueError(f"{KEY} names more than {MOST:,} blocks, projections and weights: it is damaged.")
    shares = [
        value["sparsity"],
        value["achieved_sparsity"],
        *blocks.values(),
        *(entry["sparsity"] for entry in entries),
    ]
    if wrong := [share for share in shares if not 0 <= share <= 1]:
        raise ValueError(f"{KEY} is damaged: it has the sparsity {wrong[0]}, expected 0 to 1. Save the model again.")
    return value


def describe_sparsity(decoder: Decoder, found: Sparsity, **how: Any) -> dict[str, Any]:
    """Return the sparsity_config of a sparse model. `how` says how it was made."""
    kinds: dict[str, list[Projection]] = {}
    for block, projection in every_projection(decoder):
        if projection.pruned:
            kinds.setdefault(kind_of(block, projection), []).append(projection)
    entries: dict[str, dict[str, Any]] = {}
    for kind, pruned in kinds.items():
        zeros = sum(round(found.projections[p.name]["sparsity"] * p.numel) for p in pruned)
        numel = sum(p.numel for p in pruned)
        entries[kind] = {"sparsity": zeros / numel, "numel": numel, "weights": stored_names(decoder, pruned[0])}
        if pruned[0].transposed:
            entries[kind]["transposed"] = True
    return {
        "version": VERSION,
        "quant_method": METHOD,
        "method": "unknown",
        "sparsity": found.achieved,
        "achieved_sparsity": found.achieved,
        "block_sparsity": dict(found.blocks),
        "projections": entries,
        "left_out": [
            projection.name
            for block, projection in every_projection(decoder)
            if not projection.pruned and block.name in found.blocks and kind_of(block, projection) in kinds
        ],
        **how,
    }


def find_sparsity_config(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the `sparsity_config` of a model, or a new one that counts its zeros.

    None: the model is dense, or its weights cannot be counted.
    """
    recorded = read_sparsity_config(model.config)
    if recorded is not None or count_packed(model) or hf_private.is_quantized(model):
        return recorded
    with suppress(ValueError):  # no list of blocks is found
        decoder = find_all_projections(model)
        found = measure_sparsity(decoder)
        if found.achieved > SPARSE:
            return describe_sparsity(decoder, found)
    return None


def put_sparsity_config(config: PreTrainedConfig, value: Mapping[str, Any] | None) -> None:
    """Replace the sparsity_config of a config; None: remove it."""
    vars(config).pop(KEY, None)
    if value is not None:
        setattr(config, KEY, value)


def record_sparsity(model: PreTrainedModel, value: Mapping[str, Any] | None) -> None:
    """Put a sparsity_config into a copy of the model's config, which a dense model may share."""
    before, config = model.config, copy.copy(model.config)
    put_sparsity_config(config, value)
    for module in model.modules():  # blocks read how they attend from the model's config
        if module.__dict__.get("config") is before:
            module.config = config


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `layers.2` before `layers.10`."""
    return [(part.isdecimal(), len(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _fill(name: str, numbers: Iterable[str]) -> str:
    rest = iter(numbers)
    return ".".join(next(rest, part) if part == "*" else part for part in name.split("."))


@dataclass(frozen=True)
class StoredProjection:
    """The projection of a stored weight, or the projections of all experts in it."""

    block: str  # full name
    kind: str  # see `kind_of`
    left_out: frozenset[str] = frozenset()  # numbers of the experts in a stacked weight that were not pruned


class PrunedWeights:
    """What a `sparsity_config` names: the pruned projection of each weight in a checkpoint's files."""

    def __init__(self, sparsity_config: Mapping[str, Any]):
        self.blocks = sparsity_config.get("block_sparsity", {})
        self.left_out = set(sparsity_config.get("left_out", []))
        kinds = sparsity_config.get("projections", {})
        self._kinds = {name: kind for kind, about in kinds.items() for name in about["weights"]}
        self._block = with_stars(next(iter(self.blocks), ""))
        for kind in kinds:  # names in packed files: those of the model
            self._kinds.setdefault(f"{self._block}.{kind}.weight", kind)
            self._kinds.setdefault(f"{self._block}.{kind.replace('.*.', '.')}", kind)  # stacked experts

    def find(self, name: str) -> StoredProjection | None:
        """Return the pruned projection of a stored weight, if it is one.

        The name may have a different prefix than in the config, for example if a model was saved without its head.
        """
        starred = with_stars(name)
        alike = (known for known in self._kinds if known.endswith(f".{starred}") or starred.endswith(f".{known}"))
        kind = self._kinds.get(starred if starred in self._kinds else next(alike, ""))
        if kind is None:
            return None
        numbers, depth = [part for part in name.split(".") if part.isdecimal()], self._block.count("*")
        block = _fill(self._block, numbers[:depth])
        if block not in self.blocks:
            return None
        full = _fill(f"{block}.{kind}", numbers[depth:])
        if full in self.left_out:
            return None
        before, star, after = full.partition("*")  # a star: all experts are in one weight
        left_out = {name for name in self.left_out if star and name.startswith(before) and name.endswith(after)}
        left_out = frozenset(name.removeprefix(before).removesuffix(after) for name in left_out)
        return StoredProjection(block, kind, left_out)
