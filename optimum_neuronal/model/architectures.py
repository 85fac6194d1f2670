"""The only place that knows model families: what a projection of a given name does in its block.

A projection's *role* says what its rows feed, see [`rows`]. `DEFAULT_ROLES` knows the names that most families use, so
that a new family which uses them too needs no line here. What a family does otherwise is one `Architecture` of data,
added to the table below or, from outside the package, with [`register_architecture`].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


NEXT_BLOCK, MLP = "next block", "mlp"  # what is fed beside projections of the same module

# Role -> what its rows feed: the projection of that role in the same module (an attention, an MLP, one expert), the
# block's MLP, or the next block.
FEEDS = {
    "query": "output",
    "gated_query": "output",  # for every head its query and the gate of its output
    "key": "output",
    "value": "output",
    "qkv": "output",  # all queries, all keys, all values
    "interleaved_qkv": "output",  # for every group of heads its queries, its key, its value
    "partitioned_qvk": "output",  # four partitions, each with its queries, values, keys
    "query_a": "query",  # low-rank: to the latent vector from which the queries are made
    "kv_a": "kv",
    "kv": "output",  # for every head its key and its value
    "mixer": "output",  # of a state-space layer: gate and values, then what steers the state
    "qkvz": "output",  # of linear attention: for every key head its query, key, values, gates
    "linear_qkv": "output",  # of linear attention: all queries, all keys, all values
    "output_gate": "output",
    "gated_conv": "output",  # two gates, then values
    "output": MLP,
    "gate": "down",
    "up": "down",
    "gate_up": "down",  # all gates, all ups
    "interleaved_gate_up": "down",  # gate and up in turns
    "down": NEXT_BLOCK,
}
MLP_ENTRIES = ("gate", "up", "gate_up", "interleaved_gate_up")
BLOCK_ENTRIES = tuple(role for role, fed in FEEDS.items() if fed in ("output", "query", "kv") and role != "kv")
ATTENTION = ("query", "gated_query", "qkv", "interleaved_qkv", "partitioned_qvk")  # every token meets all before it

# Subclasses of nn.Linear with a forward of their own that computes what nn.Linear's does.
AS_LINEAR = ("FalconLinear",)

EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")  # what configs call it

# Last components of a name inside its block -> role; None for what is no projection of features: never pruned.
DEFAULT_ROLES: dict[str, str | None] = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "qkv_proj": "qkv",
    "Wqkv": "qkv",
    "c_attn": "qkv",
    "query_key_value": "interleaved_qkv",
    "q_a_proj": "query_a",
    "q_b_proj": "query",
    "kv_a_proj_with_mqa": "kv_a",
    "kv_b_proj": "kv",
    "in_proj": "mixer",
    "in_proj_qkvz": "qkvz",
    "in_proj_qkv": "linear_qkv",
    "in_proj_z": "output_gate",
    "self_attn.gate_proj": "output_gate",
    "output_gate": "output_gate",
    "o_proj": "output",
    "out_proj": "output",
    "dense": "output",
    "attn.c_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "shared_mlp.input_linear": "gate_up",
    "fc1": "up",
    "fc_in": "up",
    "c_fc": "up",
    "dense_h_to_4h": "up",
    "down_proj": "down",
    "fc2": "down",
    "fc_out": "down",
    "mlp.c_proj": "down",
    "dense_4h_to_h": "down",
    "w2": "down",
    "shared_mlp.output_linear": "down",
    # encoders: BERT and its kin; DistilBERT; ModernBERT
    "self.query": "query",
    "self.key": "key",
    "self.value": "value",
    "intermediate.dense": "up",
    "output.dense": "down",
    "attention.output.dense": "output",
    "q_lin": "query",
    "k_lin": "key",
    "v_lin": "value",
    "out_lin": "output",
    "lin1": "up",
    "lin2": "down",
    "attn.Wo": "output",
    "mlp.Wi": "gate_up",
    "mlp.Wo": "down",
    # routers and gates of experts
    "router": None,
    "gate": None,
    "gate.wg": None,
    # embeddings that every block adds
    "per_layer_input_gate": None,
    "per_layer_projection": None,
    "shared_expert_gate": None,
    # state-space parameters: time steps, decays, input and output matrices
    "A_log": None,
    "x_proj": None,
    "dt_proj": None,
    "in_proj_a": None,
    "in_proj_b": None,
    "in_proj_ba": None,
}


def _check_types(architecture: "Architecture") -> None:
    """Raises `TypeError` for fields that a typing error made into something else."""
    roles, parallel = architecture.roles, architecture.parallel
    if not isinstance(roles, Mapping) or not all(isinstance(name, str) for name in roles):
        raise TypeError(f"roles is {roles!r}: expected names of projections -> roles, such as {{'q_proj': 'query'}}.")
    names = isinstance(parallel, tuple) and all(isinstance(name, str) for name in parallel)
    if not (isinstance(parallel, bool) or names):
        raise TypeError(f"parallel is {parallel!r}: expected True, False, or a tuple of names of config fields.")
    if not isinstance(architecture.stacked_experts, bool):
        raise TypeError(f"stacked_experts is {architecture.stacked_experts!r}: expected True or False.")
    if architecture.blocks is not None and not (isinstance(architecture.blocks, str) and architecture.blocks):
        raise TypeError(f"blocks is {architecture.blocks!r}: expected the name of a module, such as 'model.layers'.")


@dataclass(frozen=True)
class Architecture:
    """What a model family does differently from the default.

    Args:
        roles (`Mapping[str, str | None]`):
            Name of a projection inside its block, or its last components (`"mlp.c_proj"`), -> its role, a key of
            `FEEDS`, or None to leave it dense. Added to `DEFAULT_ROLES`.
        parallel (`bool` or `tuple[str, ...]`):
            Whether attention and MLP read the same hidden states, so that the attention's output feeds the next block
            and not the MLP. Names: true if one of these attributes of the model's config is.
        stacked_experts (`bool`):
            Whether the experts, instead of a token's indices, take their inputs stacked, (experts * tokens, hidden),
            and store their weights transposed.
        blocks (`str`, *optional*):
            Name of the decoder's `ModuleList` of blocks, where the classes that are not to be split do not lead to it.
    """

    roles: Mapping[str, str | None] = field(default_factory=dict)
    parallel: bool | tuple[str, ...] = False
    stacked_experts: bool = False
    blocks: str | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        for name, role in self.roles.items():
            if role is not None and role not in FEEDS:
                raise ValueError(f"Projection {name!r} has the role {role!r}: expected one of {', '.join(FEEDS)}.")

    def find_role(self, name: str) -> tuple[bool, str | None]:
        """Whether the parameter called `name` inside its block (`"self_attn.q_proj"`) is known, and its role."""
        roles = {**DEFAULT_ROLES, **self.roles}
        parts = name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
        known = next((suffix for suffix in suffixes if suffix in roles), None)
        return known is not None, None if known is None else roles[known]

    def is_parallel(self, config: Any) -> bool:
        """Whether attention and MLP are parallel in a model whose text config is `config`."""
        if isinstance(self.parallel, bool):
            return self.parallel
        return any(bool(getattr(config, name, False)) for name in self.parallel)


_ARCHITECTURES = {
    "codegen": Architecture(roles={"qkv_proj": "partitioned_qvk"}, parallel=True),
    "cohere": Architecture(parallel=True),
    "cohere2": Architecture(parallel=True),
    "falcon": Architecture(parallel=("parallel_attn",)),
    "gpt_bigcode": Architecture(roles={"c_attn": "interleaved_qkv"}),
    "gpt_neox": Architecture(parallel=("use_parallel_residual",)),
    "gptj": Architecture(parallel=True),
    "minimax": Architecture(roles={"qkv_proj": "interleaved_qkv"}),
    "lfm2": Architecture(roles={"conv.in_proj": "gated_conv"}),
    "lfm2_moe": Architecture(roles={"conv.in_proj": "gated_conv"}),
    "llama4_text": Architecture(stacked_experts=True),
    "phi": Architecture(parallel=True),
    "qwen3_5_moe_text": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "qwen3_5_text": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "qwen3_next": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "stablelm": Architecture(parallel=("use_parallel_residual",)),
}


def is_of_experts(role: str | None, ndim: int) -> bool:
    """Whether a weight of a role and of so many dimensions is that of all experts of a layer: (experts, ., .)."""
    return ndim == 3 and (role == "down" or role in MLP_ENTRIES)


def with_gates_in_turns(role: str) -> str:
    """The role of an experts' weight in which gate and up, if it holds both, take turns."""
    return "interleaved_gate_up" if role == "gate_up" else role


def is_gated(role: str) -> bool:
    """Whether the first weight of an expert, of this role, also makes the gates of what it makes."""
    return role != "up"


def experts_per_token(config: Any) -> int | None:
    """How many experts a token is sent to, at most over the layers; None if the text config does not say."""
    found = next((value for name in EXPERTS_PER_TOKEN if (value := getattr(config, name, None))), None)
    return max(found) if isinstance(found, list) else found


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Teaches the package a model family, or replaces what it knows of one.

    Args:
        model_type (`str`): `model.config.get_text_config().model_type` of the family.
        architecture ([`Architecture`]): what differs from the default.
    """
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"model_type is {model_type!r}: expected a family's name, such as 'llama'.")
    if not isinstance(architecture, Architecture):
        raise TypeError(f"register_architecture expects an Architecture, got {type(architecture).__name__}.")
    _ARCHITECTURES[model_type] = architecture


def find_architecture(model_type: str) -> Architecture:
    """The entry of `model_type`, or the default one."""
    return _ARCHITECTURES.get(model_type, Architecture())
