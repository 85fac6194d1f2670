"""The only place that knows model families: which role each projection plays, and which features its rows feed.

A projection's *role* says where its rows go. Llama-like families need no entry in the table below: their projections
have the default names and the default layout. A family that departs from it is one `Architecture` of data, added
here or, from outside the package, with [`register_architecture`].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


# The places of a block whose inputs are compared, named by what reads them.
OUTPUT_INPUT, MLP_INPUT, DOWN_INPUT, NEXT_INPUT = "output", "mlp", "down", "next"

# Role -> the place that the projection's rows feed (DESIGN: row step).
FEEDS = {
    "query": OUTPUT_INPUT,
    "key": OUTPUT_INPUT,
    "value": OUTPUT_INPUT,
    "qkv": OUTPUT_INPUT,
    "output": MLP_INPUT,
    "gate": DOWN_INPUT,
    "up": DOWN_INPUT,
    "gate_up": DOWN_INPUT,
    "down": NEXT_INPUT,
}
ROLES = tuple(FEEDS)

DEFAULT_ROLES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "out_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "fc1": "up",
    "fc2": "down",
}


@dataclass(frozen=True)
class Architecture:
    """What a model family does differently from the default.

    Args:
        roles (`Mapping[str, str]`):
            Name of a projection inside its block, or its last components (`"mlp.c_proj"`), -> role, one of
            `query`, `key`, `value`, `qkv`, `output`, `gate`, `up`, `gate_up`, `down`. Added to the default names.
        qkv_layout (`str`):
            Order of the rows of a fused `qkv` projection: `"contiguous"` (all q, all k, all v) or
            `"interleaved"` (for every head its q, k and v).
        parallel_attribute (`str`, *optional*):
            Attribute of the model's config that is true when attention and MLP read the same hidden states, so that
            the attention's output feeds the next block and not the MLP.
        parallel (`bool`): whether attention and MLP are always parallel.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    qkv_layout: str = "contiguous"
    parallel_attribute: str | None = None
    parallel: bool = False

    def __post_init__(self):
        for name, role in self.roles.items():
            if role not in ROLES:
                raise ValueError(f"Projection {name!r} has the role {role!r}: expected one of {', '.join(ROLES)}.")
        if self.qkv_layout not in ("contiguous", "interleaved"):
            raise ValueError(f"qkv_layout is {self.qkv_layout!r}: expected 'contiguous' or 'interleaved'.")

    def role(self, name: str) -> str | None:
        """Role of the projection called `name` inside its block (`"self_attn.q_proj"`), None if it has none here."""
        roles = {**DEFAULT_ROLES, **self.roles}
        parts = name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
        return next((roles[suffix] for suffix in suffixes if suffix in roles), None)

    def feeds(self, role: str, config) -> str:
        """The place that the rows of a projection with this role feed; `config` is the text model's config."""
        parallel = self.parallel or bool(self.parallel_attribute and getattr(config, self.parallel_attribute, False))
        return NEXT_INPUT if parallel and role == "output" else FEEDS[role]


_ARCHITECTURES = {
    "gpt2": Architecture(
        roles={"attn.c_attn": "qkv", "attn.c_proj": "output", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    ),
    "gpt_neox": Architecture(
        roles={"query_key_value": "qkv", "dense": "output", "dense_h_to_4h": "up", "dense_4h_to_h": "down"},
        qkv_layout="interleaved",
        parallel_attribute="use_parallel_residual",
    ),
    "phi": Architecture(roles={"dense": "output"}, parallel=True),
}


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Teaches the package a model family, or replaces what it knows of one.

    Args:
        model_type (`str`): `model.config.model_type` of the family.
        architecture ([`Architecture`]): what differs from the default.
    """
    if not isinstance(architecture, Architecture):
        raise TypeError(f"register_architecture expects an Architecture, got {type(architecture).__name__}.")
    _ARCHITECTURES[model_type] = architecture


def find_architecture(model_type: str) -> Architecture:
    """The entry of `model_type`, or the default one."""
    return _ARCHITECTURES.get(model_type, Architecture())


@dataclass(frozen=True)
class RowGroup:
    """Rows of one part of a projection (the q of a fused qkv, say) and the features that each of them feeds.

    Args:
        rows (`Tensor` of int64, shape (n,)): row indices in the projection's weight.
        features (`Tensor` of int64, shape (n, served)): for every row, the features of the place it feeds.
    """

    rows: torch.Tensor
    features: torch.Tensor

    def values(self, place: torch.Tensor) -> torch.Tensor:
        """Value of every row, shape (n,): the mean of `place`, shape (in,), over the features that the row feeds."""
        return place[self.features.to(place.device)].mean(dim=1)


def row_groups(role: str, layout: str, out_features: int, fed_features: int, heads: int, kv_heads: int):
    """Splits a projection's rows into parts and says which features of the fed place every row serves.

    Args:
        role (`str`): the projection's role.
        layout (`str`): layout of a fused qkv, see [`Architecture`].
        out_features (`int`): rows of the weight.
        fed_features (`int`): length of the fed place's activation.
        heads, kv_heads (`int`): attention heads, and those of keys and values (grouped-query attention).

    Returns:
        `list[RowGroup]`: one for each part; a row of k or v serves all query heads of its group.

    Raises:
        `ValueError`: the shapes do not fit each other.
    """
    everything = torch.arange(out_features)
    if role in ("query", "output", "gate", "up", "down"):
        groups = [RowGroup(everything, everything[:, None])]
    elif role == "gate_up":
        half = torch.arange(out_features // 2)
        groups = [RowGroup(half, half[:, None]), RowGroup(half + len(half), half[:, None])]
    else:
        groups = _attention_groups(role, layout, fed_features, heads, kv_heads)
    rows = torch.cat([group.rows for group in groups])
    widest = max(int(group.features.max()) for group in groups)
    if rows.numel() != out_features or not torch.equal(rows.sort().values, everything) or widest + 1 != fed_features:
        raise ValueError(
            f"{out_features} rows of a {role!r} projection do not map to {fed_features} features with {heads} heads "
            f"and {kv_heads} key-value heads"
        )
    return groups


def _attention_groups(role: str, layout: str, fed_features: int, heads: int, kv_heads: int) -> list[RowGroup]:
    head_dim = fed_features // heads
    query = torch.arange(heads * head_dim).view(heads, head_dim)
    served = query.view(kv_heads, heads // kv_heads, head_dim).transpose(1, 2).flatten(0, 1)  # (kv rows, group)
    if role in ("key", "value"):
        return [RowGroup(torch.arange(len(served)), served)]
    if layout == "interleaved":
        rows = torch.arange(3 * heads * head_dim).view(heads, 3, head_dim)
        return [RowGroup(rows[:, part].flatten(), query.flatten()[:, None]) for part in range(3)]
    sizes = [heads * head_dim, len(served), len(served)]
    parts = torch.arange(sum(sizes)).split(sizes)
    return [RowGroup(rows, feeds) for rows, feeds in zip(parts, (query.flatten()[:, None], served, served))]
