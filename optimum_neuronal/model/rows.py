"""The features that each row of a projection feeds, by which the row step allocates sparsity.

Each role of `architectures.FEEDS` whose rows do not feed features one to one has a function. Sizes other than the
number of heads follow from the shapes of the projection and of the projection that reads its output.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowGroup:
    """Rows of one kind in a projection, such as q in a fused qkv, and the features that each of them feeds."""

    rows: torch.Tensor  # indices in the projection's weight: int64, shape (n,)
    features: torch.Tensor  # int64, shape (n, served), or (1, served) if all rows feed the same; `served` may be 0

    def values(self, place: torch.Tensor) -> torch.Tensor:
        """Return for each row, shape (n,), the mean of `place`, shape (in,), over the features that the row feeds."""
        if self.features.shape[1] == 0:
            return place.new_zeros(len(self.rows))
        return place[self.features.to(place.device)].mean(dim=1).expand(len(self.rows))


def row_groups(role: str, out_features: int, fed_features: int, config) -> list[RowGroup]:
    """Group the rows of a projection by kind, with the features that each row feeds.

    `fed_features` is the number of input features of the reader. A row of k or v serves all query heads of its group.
    Raise `ValueError` if the shapes do not fit each other.
    """
    try:
        groups = _LAYOUTS.get(role, _one_to_one(lambda rows: [rows]))(out_features, fed_features, config)
        rows = torch.cat([group.rows for group in groups]).sort().values
        fits = torch.equal(rows, torch.arange(out_features))
        fits = fits and torch.cat([group.features.flatten() for group in groups]).max() + 1 == fed_features
    except (AttributeError, RuntimeError, TypeError, ZeroDivisionError):  # a size that the config lacks, or a bad view
        fits = False
    if not fits:
        raise ValueError(
            f"{out_features} rows of a {role!r} projection do not map to {fed_features} features with "
            f"{getattr(config, 'num_attention_heads', None)} attention heads"
        )
    return groups


def _group(rows: torch.Tensor, features: torch.Tensor) -> RowGroup:
    return RowGroup(rows.flatten(), features.reshape(rows.numel(), -1))


def _low_rank(rows: int, fed: int, config) -> list[RowGroup]:
    """Return the latent vector's rows, and the keys' rotary rows, which the vector's reader does not read."""
    latent = RowGroup(torch.arange(fed), torch.arange(fed)[:, None])
    rotary = RowGroup(torch.arange(fed, rows), torch.empty(1, 0, dtype=torch.int64))
    return [latent, rotary] if rows > fed else [latent]


def _mixer(rows: int, fed: int, config) -> list[RowGroup]:
    """Return gate and values, in either order, then the rows that steer the whole state."""
    everything = torch.arange(fed)
    groups = [_group(everything + start, everything) for start in (0, fed)]
    steering = RowGroup(torch.arange(2 * fed, rows), everything[None])
    return [*groups, steering] if rows > 2 * fed else groups


def _heads(fed: int, config) -> torch.Tensor:
    """Return the fed features by head, shape (heads, head size)."""
    return torch.arange(fed).view(config.num_attention_heads, -1)


def _per_head(rows: torch.Tensor, heads: torch.Tensor) -> RowGroup:
    """Map rows of shape (heads, n) to their head's features: one to one if the numbers are equal, else to all."""
    if rows.shape == heads.shape:
        return _group(rows, heads)
    return _group(rows, heads[:, None].expand(-1, rows.shape[1], -1))


def _served(heads: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the features that the rows of k or v serve, shape (kv_heads * head size, query heads of a group)."""
    return heads.view(kv_heads, -1, heads.shape[1]).transpose(1, 2).flatten(0, 1)


def _gated_query(rows: int, fed: int, config) -> list[RowGroup]:
    heads = _heads(fed, config)
    by_head = torch.arange(rows).view(len(heads), 2, -1)
    return [_per_head(by_head[:, 0], heads), _per_head(by_head[:, 1], heads)]


def _key_or_value(rows: int, fed: int, config) -> list[RowGroup]:
    heads = _heads(fed, config)
    kv_heads, rest = divmod(rows, heads.shape[1])
    if rest == 0 and len(heads) % kv_heads == 0:
        return [_group(torch.arange(rows), _served(heads, kv_heads))]
    by_group = heads.view(config.num_key_value_heads, -1)  # keys that are longer or shorter than values
    return [_per_head(torch.arange(rows).view(len(by_group), -1), by_group)]


def _contiguous(rows: int, fed: int, config) -> list[RowGroup]:
    heads = _heads(fed, config)
    served = _served(heads, (rows - fed) // (2 * heads.shape[1]))
    query, key, value = torch.arange(rows).split([fed, len(served), len(served)])
    return [_group(query, heads), _group(key, served), _group(value, served)]


def _interleaved(rows: int, fed: int, config) -> list[RowGroup]:
    heads = _heads(fed, config)
    kv_heads = (rows - fed) // (2 * heads.shape[1])
    served = _served(heads, kv_heads)
    groups = torch.arange(rows).view(kv_heads, -1, heads.shape[1])
    return [_group(groups[:, :-2], heads), _group(groups[:, -2], served), _group(groups[:, -1], served)]


def _key_and_value(rows: int, fed: int, config) -> list[RowGroup]:
    heads = _heads(fed, config)
    by_head = torch.arange(rows).view(len(heads), -1)
    size = heads.shape[1]
    return [_per_head(by_head[:, :-size], heads), _per_head(by_head[:, -size:], heads)]


def _qkvz(rows: int, fed: int, config) -> list[RowGroup]:
    key_heads, key_size = config.linear_num_key_heads, config.linear_key_head_dim
    values = torch.arange(fed).view(key_heads, -1)
    sizes = [key_size, key_size, values.shape[1], values.shape[1]]
    query, key, value, gate = torch.arange(rows).view(key_heads, -1).split(sizes, dim=1)
    every = values[:, None].expand(-1, key_size, -1)
    return [_group(query, every), _group(key, every), _group(value, values), _group(gate, values)]


def _linear_qkv(rows: int, fed: int, config) -> list[RowGroup]:
    values = torch.arange(fed).view(config.linear_num_key_heads, -1)
    query, key, value = torch.arange(rows).split([(rows - fed) // 2, (rows - fed) // 2, fed])
    every = values[:, None].expand(-1, len(query) // len(values), -1)
    return [_group(query, every), _group(key, every), _group(value, values)]


Layout = Callable[[int, int, object], list[RowGroup]]  # rows, fed features, config -> groups


def _one_to_one(split: Callable[[torch.Tensor], Iterable[torch.Tensor]]) -> Layout:
    """Return the layout of rows that `split` separates into kinds with one row for every feature."""
    return lambda rows, fed, config: [_group(kind, torch.arange(kind.numel())) for kind in split(torch.arange(rows))]


_LAYOUTS: dict[str, Layout] = {
    "several_heads": lambda rows, fed, config: [RowGroup(torch.arange(rows), torch.arange(fed)[None])],
    "query": lambda rows, fed, config: [
        _per_head(torch.arange(rows).view(config.num_attention_heads, -1), _heads(fed, config))
    ],
    "gated_query": _gated_query,
    "key": _key_or_value,
    "value": _key_or_value,
    "qkv": _contiguous,
    "interleaved_qkv": _interleaved,
    "partitioned_qvk": _one_to_one(lambda rows: rows.view(4, 3, -1).unbind(1)),
    "query_a": _low_rank,
    "kv_a": _low_rank,
    "kv": _key_and_value,
    "mixer": _mixer,
    "qkvz": _qkvz,
    "linear_qkv": _linear_qkv,
    "gated_conv": _one_to_one(lambda rows: rows.view(3, -1)),
    "gate_up": _one_to_one(lambda rows: rows.chunk(2)),
    "interleaved_gate_up": _one_to_one(lambda rows: rows.view(-1, 2).unbind(1)),
}
