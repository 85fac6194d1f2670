"""The only place that knows model families: the roles of projections by their names.

A projection's *role* says what its rows feed, see `rows`. `DEFAULT_ROLES` holds the names that most families use: a new
family that uses them needs no line here. Differences of a family are one `Architecture`, added to the table below or,
from outside the package, with [`register_architecture`].
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..common.validation import check_choice, check_flag


NEXT_BLOCK, MLP = "next block", "mlp"  # fed by rows that feed no projection of the same module

# Role -> the role that its rows feed in the same module (an attention, an MLP, one expert), or the block's MLP, or the
# next block.
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

STREAM, HEADS = "stream", "heads"  # values of `Architecture.rotates`
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")  # what configs call it

# Role -> names of projections inside their block, or the last components of them. None: what is never pruned.
_NAMES: dict[str | None, tuple[str, ...]] = {
    "query": ("q_proj", "q_b_proj", "self.query", "q_lin"),
    "key": ("k_proj", "self.key", "k_lin"),
    "value": ("v_proj", "self.value", "v_lin"),
    "qkv": ("qkv_proj", "Wqkv", "c_attn"),
    "interleaved_qkv": ("query_key_value",),
    "query_a": ("q_a_proj",),
    "kv_a": ("kv_a_proj_with_mqa",),
    "kv": ("kv_b_proj",),
    "mixer": ("in_proj",),
    "qkvz": ("in_proj_qkvz",),
    "linear_qkv": ("in_proj_qkv",),
    "output_gate": ("in_proj_z", "self_attn.gate_proj", "output_gate"),
    "output": ("o_proj", "out_proj", "dense", "attn.c_proj", "attention.output.dense", "out_lin", "attn.Wo"),
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h", "intermediate.dense", "lin1"),
    "gate_up": ("gate_up_proj", "shared_mlp.input_linear", "mlp.Wi"),
    "down": ("down_proj", "fc2", "fc_out", "mlp.c_proj", "dense_4h_to_h", "w2", "shared_mlp.output_linear",
             "output.dense", "lin2", "mlp.Wo"),
    None: (
        "router", "gate", "gate.wg", "shared_expert_gate",  # routers and gates of experts
        "per_layer_input_gate", "per_layer_projection",  # embeddings that every block adds
        "A_log", "x_proj", "dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba",  # parameters of a state space
    ),
}  # fmt: skip
DEFAULT_ROLES: dict[str, str | None] = {name: role for role, names in _NAMES.items() for name in names}


@dataclass(frozen=True)
class Architecture:
    """The differences of a model family from the default.

    Args:
        roles (`Mapping[str, str | None]`):
            Name of a projection inside its block, or its last components (`"mlp.c_proj"`), -> its role, a key of
            `FEEDS`, or None to leave it dense. Added to `DEFAULT_ROLES`.
        parallel (`bool` or `tuple[str, ...]`):
            True if attention and MLP read the same hidden states, so that the attention's output feeds the next block
            and not the MLP. Names of attributes of the model's config: true if one of them is.
        stacked_experts (`bool`):
            True if the experts take their inputs stacked, (experts * tokens, hidden), and not the indices of each
            token's experts, and store their weights transposed.
        rotates (`str`, *optional*):
            What may be rotated without changing what the model computes. `"stream"`: the residual stream, which only
            embeddings and blocks write and only RMS or layer norms of known names read, and the heads' values;
            `"heads"`: the values alone. None: not known.
        entrance (`str`, *optional*):
            Of a model of several modalities, whose entry is that of `model.config.model_type`: the end of the name of the one
            linear layer by which images or sounds enter the residual stream. None: not known, or more than one.
        blocks (`str`, *optional*):
            Name of the decoder's `ModuleList` of blocks, if the classes that must not be split do not lead to it.
    """

    roles: Mapping[str, str | None] = field(default_factory=dict)
    parallel: bool | tuple[str, ...] = False
    stacked_experts: bool = False
    rotates: str | None = None
    entrance: str | None = None
    blocks: str | None = None

    def __post_init__(self) -> None:
        roles, parallel, blocks = self.roles, self.parallel, self.blocks
        if not isinstance(roles, Mapping) or not all(isinstance(name, str) for name in roles):
            raise TypeError(f"roles is {roles!r}: expected projection -> role, such as {{'q_proj': 'query'}}.")
        names = isinstance(parallel, tuple) and all(isinstance(name, str) for name in parallel)
        if not (isinstance(parallel, bool) or names):
            raise TypeError(f"parallel is {parallel!r}: expected True, False, or a tuple of names of config fields.")
        check_flag("stacked_experts", self.stacked_experts)
        if blocks is not None and not (isinstance(blocks, str) and blocks):
            raise TypeError(f"blocks is {blocks!r}: expected the name of a module, such as 'model.layers'.")
        if self.entrance is not None and not (isinstance(self.entrance, str) and self.entrance):
            raise TypeError(
                f"entrance is {self.entrance!r}: expected the end of a module's name, such as 'projector.linear_2'."
            )
        if self.rotates is not None:
            check_choice("rotates", self.rotates, (STREAM, HEADS))
        for name, role in roles.items():
            if role is not None and role not in FEEDS:
                raise ValueError(f"Projection {name!r} has the role {role!r}: expected one of {', '.join(FEEDS)}.")

    def find_role(self, name: str) -> tuple[bool, str | None]:
        """Return True and its role if a parameter is known by its name inside its block (`"self_attn.q_proj"`)."""
        roles = {**DEFAULT_ROLES, **self.roles}
        parts = name.split(".")
        suffixes = (".".join(parts[start:]) for start in range(len(parts)))  # the longest first
        known = next((suffix for suffix in suffixes if suffix in roles), None)
        return known is not None, None if known is None else roles[known]

    def is_parallel(self, config: Any) -> bool:
        """Return True if attention and MLP are parallel in a model with this text config."""
        if isinstance(self.parallel, bool):
            return self.parallel
        return any(bool(getattr(config, name, False)) for name in self.parallel)


_ARCHITECTURES = {
    "codegen": Architecture(roles={"qkv_proj": "partitioned_qvk"}, parallel=True, rotates=STREAM),
    "cohere": Architecture(parallel=True, rotates=STREAM),
    "cohere2": Architecture(parallel=True, rotates=STREAM),
    "falcon": Architecture(parallel=("parallel_attn",), rotates=STREAM),
    "gpt_bigcode": Architecture(roles={"c_attn": "interleaved_qkv"}, rotates=STREAM),
    "gpt_neox": Architecture(parallel=("use_parallel_residual",), rotates=STREAM),
    "gptj": Architecture(parallel=True, rotates=STREAM),
    "minimax": Architecture(roles={"qkv_proj": "interleaved_qkv"}),
    "lfm2": Architecture(roles={"conv.in_proj": "gated_conv"}),
    "lfm2_moe": Architecture(roles={"conv.in_proj": "gated_conv"}),
    "llama4_text": Architecture(stacked_experts=True, rotates=STREAM),
    "phi": Architecture(parallel=True, rotates=STREAM),
    "qwen3_5_moe_text": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "qwen3_5_text": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "qwen3_next": Architecture(roles={"self_attn.q_proj": "gated_query"}),
    "stablelm": Architecture(parallel=("use_parallel_residual",), rotates=STREAM),
    # RMS or layer norms in front of attention and MLP, and none behind them.
    **dict.fromkeys(
        ("apertus", "biogpt", "ernie4_5_moe", "gemma", "glm4_moe", "gpt2", "gpt_neo", "granite", "granitemoe", "hunyuan_v1_moe", "llama",
         "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmoe", "opt", "persimmon", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
         "qwen3_moe", "qwen2_5_vl_text", "qwen2_vl_text", "smollm3", "starcoder2"),
        Architecture(rotates=STREAM),
    ),
    # Norms behind attention and MLP or the embeddings, experts with biases, or positions that are computed and added.
    **dict.fromkeys(
        ("bloom", "exaone4", "gemma2", "gemma3_text", "glm4", "gpt_oss", "olmo2", "xglm"),
        Architecture(rotates=HEADS),
    ),
    # Models of several modalities, by their own type.
    **dict.fromkeys(
        ("internvl", "llava", "mistral3", "vipllava"), Architecture(entrance="multi_modal_projector.linear_2")
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), Architecture(entrance="connector.modality_projection.proj")),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), Architecture(entrance="visual.merger.mlp.2")),
}  # fmt: skip


def is_of_experts(role: str | None, ndim: int) -> bool:
    """Return True if a weight of this role and number of dimensions holds all experts of a layer: (experts, ., .)."""
    return ndim == 3 and (role == "down" or role in MLP_ENTRIES)


def experts_per_token(config: Any) -> int | None:
    """Return the number of experts for each token, the largest of all layers; None if the text config does not say."""
    found = next((value for name in EXPERTS_PER_TOKEN if (value := getattr(config, name, None))), None)
    return max(found) if isinstance(found, list) else found


def register_architecture(model_type: str, architecture: Architecture) -> None:
    """Add a model family, or replace its entry.

    Args:
        model_type (`str`): `model.config.get_text_config().model_type` of the family.
        architecture ([`Architecture`]): its differences from the default.
    """
    if not isinstance(model_type, str) or not model_type:
        raise TypeError(f"model_type is {model_type!r}: expected a family's name, such as 'llama'.")
    if not isinstance(architecture, Architecture):
        raise TypeError(f"register_architecture expects an Architecture, got {type(architecture).__name__}.")
    _ARCHITECTURES[model_type] = architecture


def find_architecture(model_type: str) -> Architecture:
    """Return the entry of a family, or the default one."""
    return _ARCHITECTURES.get(model_type, Architecture())
