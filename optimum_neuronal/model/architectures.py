"""The only place that knows model families: the roles of projections by their names.

A projection's *role* says what its rows feed. `DEFAULT_ROLES` holds the names that most families use, so most new
families need no line here. The differences of a family are one `Architecture`, in the table below or registered with
[`register_architecture`].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


NEXT_BLOCK, MLP = "next block", "mlp"  # fed by rows that feed no projection of the same module

# Role -> the role that its rows feed in the same module (an attention, an MLP, one expert), or the block's MLP, or the
# next block. None: NeuronAL's row step does not know which features the rows feed.
FEEDS = {
    "query": "output",
    "key": "output",
    "value": "output",
    "qkv": "output",  # all queries, all keys, all values
    "interleaved_qkv": "output",  # for every group of heads its queries, its key, its value
    "output_gate": "output",
    "mixer": None,  # others before the output: of latent or linear attention, a state space, a convolution
    "output": MLP,
    "gate": "down",
    "up": "down",
    "gate_up": "down",  # all gates, all ups
    "interleaved_gate_up": None,  # gate and up in turns
    "down": NEXT_BLOCK,
}
MLP_ENTRIES = ("gate", "up", "gate_up", "interleaved_gate_up")
BLOCK_ENTRIES = ("query", "key", "value", "qkv", "interleaved_qkv", "output_gate", "mixer")

# Role -> names of projections inside their block, or the last components of them. None: what is never pruned.
_NAMES: dict[str | None, tuple[str, ...]] = {
    "query": ("q_proj", "self.query", "q_lin"),
    "key": ("k_proj", "self.key", "k_lin"),
    "value": ("v_proj", "self.value", "v_lin"),
    "qkv": ("qkv_proj", "Wqkv", "c_attn"),
    "interleaved_qkv": ("query_key_value",),
    "mixer": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "in_proj", "in_proj_qkvz", "in_proj_qkv"),
    "output_gate": ("in_proj_z", "self_attn.gate_proj", "output_gate"),
    "output": ("o_proj", "out_proj", "dense", "attn.c_proj", "attention.output.dense", "out_lin", "attn.Wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "intermediate.dense", "lin1"),
    "gate_up": ("gate_up_proj", "shared_mlp.input_linear", "mlp.Wi"),
    "down": ("down_proj", "fc2", "fc_out", "mlp.c_proj", "dense_4h_to_h", "w2", "shared_mlp.output_linear",
             "output.dense", "lin2", "mlp.Wo"),
    None: (
        "router", "gate", "gate.wg", "shared_expert_gate",  # routers of experts, see `experts`
        "per_layer_input_gate", "per_layer_projection",  # embeddings that every block adds
        "self_attn.g_proj",  # a gate of each head
        "A_log", "x_proj", "dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba",  # parameters of a state space
    ),
}  # fmt: skip
DEFAULT_ROLES: dict[str, str | None] = {name: role for role, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class Architecture:
    """The differences of a model family from the default.

    Args:
        roles (`Mapping[str, str | None]`):
            Name of a projection inside its block, or the last components of it (`"mlp.c_proj"`), -> its role, a key of
            `FEEDS`, or None to leave it dense. Added to `DEFAULT_ROLES`.
        parallel (`bool` or `tuple[str, ...]`):
            True if attention and MLP read the same hidden states, so that the attention's output feeds the next block
            and not the MLP. Or names of config fields, one of which must be true.
        stacked_experts (`bool`):
            True if the experts take their inputs stacked, (experts * tokens, hidden), instead of the indices of each
            token's experts, and store their weights transposed.
        blocks (`str`, *optional*):
            Name of the decoder's `ModuleList` of blocks, if transformers' `_no_split_modules` does not lead to it.
    """

    roles: Mapping[str, str | None] = field(default_factory=dict)
    parallel: bool | tuple[str, ...] = False
    stacked_experts: bool = False
    blocks: str | None = None

    def __post_init__(self) -> None:
        for name, role in self.roles.items():
            if role is not None and role not in FEEDS:
                raise ValueError(f"Projection {name!r} has the role {role!r}: expected one of {', '.join(FEEDS)}.")

    def find_role(self, name: str) -> tuple[bool, str | None]:
        """Return True and its role if a parameter is known by its name inside its block, `"self_attn.q_proj"`."""
        roles = {**DEFAULT_ROLES, **self.roles}
        parts = name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
        known = next((suffix for suffix in suffixes if suffix in roles), None)
        return known is not None, None if known is None else roles[known]

    def is_parallel(self, config: Any) -> bool:
        """Return True if attention and MLP are parallel in a model with this text config."""
        names = () if isinstance(self.parallel, bool) else self.parallel
        return self.parallel is True or any(getattr(config, name, False) for name in names)


_ARCHITECTURES = {
    "codegen": Architecture(roles={"qkv_proj": "mixer"}, parallel=True),
    "diffllama": Architecture(roles=dict.fromkeys(("q_proj", "k_proj", "v_proj"), "mixer")),
    "falcon": Architecture(parallel=("parallel_attn",)),
    "gpt_bigcode": Architecture(roles={"c_attn": "interleaved_qkv"}),
    "llama4_text": Architecture(stacked_experts=True),
    "minimax": Architecture(roles={"qkv_proj": "mixer"}),
    **dict.fromkeys(
        ("cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "gptj", "phi"), Architecture(parallel=True)
    ),
    **dict.fromkeys(("gpt_neox", "stablelm"), Architecture(parallel=("use_parallel_residual",))),
    **dict.fromkeys(
        ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), Architecture(roles={"self_attn.q_proj": "mixer"})
    ),
}


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Add a model family, or replace its entry.

    Args:
        model_type (`str`): `model.config.get_text_config().model_type` of the family.
        architecture ([`Architecture`]): its differences from the default.
    """
    _ARCHITECTURES[model_type] = architecture


def find_architecture(model_type: str) -> Architecture:
    """Return the entry of a family, or the default one."""
    return _ARCHITECTURES.get(model_type, Architecture())
