"""The families of the coverage matrix: how a tiny model of each is made, and which projections it must have.

The projections are written out by hand, apart from the package's own table.
"""

from dataclasses import dataclass, field


VOCABULARY, HIDDEN, LAYERS, EXPERTS = 64, 32, 3, 4

SHAPES = dict(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A tiny model of a family.

    Args:
        projections: names inside a block, the experts' with a `*`; one string for all blocks, or one for each.
        overrides: values of the config beside `SHAPES`; all of them for a multimodal one.
        title: the usual name of the family.
    """

    title: str
    projections: str | tuple[str, ...]
    overrides: dict = field(default_factory=dict)

    @property
    def config(self) -> dict:
        """Values for the family's config class."""
        return self.overrides if "text_config" in self.overrides else {**SHAPES, **self.overrides}

    def expected(self, index: int) -> list[str]:
        """Names of the projections of block `index`, inside the block, sorted."""
        names = self.projections if isinstance(self.projections, str) else self.projections[index]
        return sorted(n.replace("*", str(e)) for n in names.split() for e in range(EXPERTS if "*" in n else 1))


ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
GATED = "mlp.gate_proj mlp.up_proj mlp.down_proj"
LLAMA = f"{ATTENTION} {GATED}"
EXPERTS_OF = "mlp.experts.*.gate_up_proj mlp.experts.*.down_proj"
SHARED = "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj"
MOE = f"{ATTENTION} {EXPERTS_OF}"
SHARED_PLURAL = SHARED.replace("expert", "experts")
PLAIN = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
FEED_FORWARD = "feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj"
MAMBA = "mamba.in_proj mamba.out_proj"
DELTA = "linear_attn.in_proj_qkv linear_attn.in_proj_z linear_attn.out_proj"
LIGHTNING = "self_attn.qkv_proj self_attn.output_gate self_attn.out_proj"
LATENT = (
    "self_attn.q_a_proj self_attn.q_b_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
)  # fmt: skip

_LOCAL = dict(num_local_experts=EXPERTS, num_experts_per_tok=2)
_FINE = dict(num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=24)
_DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=6, linear_value_head_dim=8,
)  # fmt: skip
_DEEPSEEK = dict(
    n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=24,
    first_k_dense_replace=1, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
    v_head_dim=6,
)  # fmt: skip

FAMILIES = {
    "llama": Family("Llama 1 to 3", LLAMA, dict(num_key_value_heads=4)),
    "mistral": Family("Mistral", LLAMA),
    "mixtral": Family("Mixtral", MOE, _LOCAL),
    "qwen2": Family("Qwen2, Qwen2.5", LLAMA),
    "qwen2_moe": Family("Qwen2-MoE", f"{MOE} {SHARED}", {**_FINE, "shared_expert_intermediate_size": 40}),
    "qwen3": Family("Qwen3", LLAMA, dict(head_dim=16)),
    "qwen3_moe": Family("Qwen3-MoE", MOE, {**_FINE, "head_dim": 8}),
    "qwen3_next": Family(
        "Qwen3-Next",
        3 * (f"linear_attn.in_proj_qkvz linear_attn.out_proj {EXPERTS_OF} {SHARED}",) + (f"{MOE} {SHARED}",),
        dict(
            **_FINE, shared_expert_intermediate_size=40, head_dim=8, num_hidden_layers=4, **_DELTA,
        ),
    ),
    "gemma": Family("Gemma", LLAMA, dict(head_dim=8)),
    "gemma2": Family("Gemma 2", LLAMA, dict(head_dim=8)),
    "gemma3_text": Family("Gemma 3, text only", LLAMA, dict(head_dim=8, num_hidden_layers=6)),
    "gemma3": Family(
        "Gemma 3, text decoder",
        LLAMA,
        dict(
            text_config={**SHAPES, "head_dim": 8, "sliding_window": 8},
            vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14),
            image_token_index=63, boi_token_index=62, eoi_token_index=61, mm_tokens_per_image=4,
        ),
    ),
    "phi": Family("Phi 1, 2", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2"),
    "phi3": Family("Phi 3, 4", "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj"),
    "phimoe": Family("Phi-MoE", MOE, _LOCAL),
    "opt": Family(
        "OPT",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2",
        dict(ffn_dim=48, word_embed_proj_dim=HIDDEN),
    ),
    "openai-gpt": Family("GPT", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    "gpt2": Family("GPT-2", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", dict(n_inner=48)),
    "gpt_bigcode": Family("GPT-BigCode, StarCoder", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", dict(n_inner=48)),
    "gpt_neo": Family(
        "GPT-Neo",
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj attn.attention.out_proj mlp.c_fc mlp.c_proj",
        dict(attention_types=[[["global", "local"], 1], [["global"], 1]], window_size=8),
    ),
    "gpt_neox": Family("GPT-NeoX, Pythia", f"attention.query_key_value attention.dense {PLAIN}"),
    "gptj": Family(
        "GPT-J", "attn.q_proj attn.k_proj attn.v_proj attn.out_proj mlp.fc_in mlp.fc_out", dict(n_inner=48, rotary_dim=8)
    ),
    "codegen": Family(
        "CodeGen", "attn.qkv_proj attn.out_proj mlp.fc_in mlp.fc_out", dict(n_inner=48, rotary_dim=8)
    ),
    "falcon": Family("Falcon", f"self_attention.query_key_value self_attention.dense {PLAIN}"),
    "bloom": Family("BLOOM", f"self_attention.query_key_value self_attention.dense {PLAIN}", dict(n_head=4, n_layer=3)),
    "mpt": Family(
        "MPT", "attn.Wqkv attn.out_proj ffn.up_proj ffn.down_proj", dict(d_model=32, n_heads=4, n_layers=3, max_seq_len=64)
    ),
    "stablelm": Family("StableLM", LLAMA),
    "starcoder2": Family("StarCoder2", f"{ATTENTION} mlp.c_fc mlp.c_proj"),
    "olmo": Family("OLMo", LLAMA),
    "olmo2": Family("OLMo 2", LLAMA),
    "olmoe": Family("OLMoE", MOE, dict(num_experts=EXPERTS, num_experts_per_tok=2)),
    "cohere": Family("Cohere Command R", LLAMA),
    "cohere2": Family("Cohere Command R7B, A", LLAMA, dict(sliding_window=8)),
    "granite": Family("Granite", LLAMA),
    "granitemoe": Family(
        "Granite-MoE",
        f"{ATTENTION} block_sparse_moe.experts.*.gate_up_proj block_sparse_moe.experts.*.down_proj",
        _LOCAL,
    ),
    "deepseek_v3": Family(
        "DeepSeek-V3, R1",
        (f"{LATENT} {GATED}",) + 2 * (f"{LATENT} {EXPERTS_OF} {SHARED_PLURAL}",),
        _DEEPSEEK,
    ),
    "gpt_oss": Family("gpt-oss", MOE, dict(**_LOCAL, head_dim=8, sliding_window=8)),
    "llama4_text": Family(
        "Llama 4, text decoder",
        2 * (
            f"{ATTENTION} {FEED_FORWARD}",
            f"{ATTENTION} {EXPERTS_OF} {SHARED}".replace("mlp", "feed_forward"),
        ),
        dict(num_local_experts=EXPERTS, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=40,
             interleave_moe_layer_step=2, num_hidden_layers=4),
    ),
    "smollm3": Family("SmolLM3", LLAMA),
    "glm4": Family("GLM-4", f"{ATTENTION} mlp.gate_up_proj mlp.down_proj", dict(head_dim=8)),
    "exaone4": Family("EXAONE 4", LLAMA, dict(head_dim=8, sliding_window=8)),
    "nemotron": Family("Nemotron", f"{ATTENTION} mlp.up_proj mlp.down_proj"),
    "persimmon": Family("Persimmon", f"self_attn.query_key_value self_attn.dense {PLAIN}"),
    "bamba": Family(
        "Bamba",
        (f"{MAMBA} {FEED_FORWARD}", f"{ATTENTION} {FEED_FORWARD}", f"{MAMBA} {FEED_FORWARD}"),
        dict(attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    ),
    "jamba": Family(
        "Jamba",
        2 * (f"{MAMBA} {FEED_FORWARD}", f"{ATTENTION} feed_forward.experts.*.gate_up_proj feed_forward.experts.*.down_proj"),
        dict(num_experts=EXPERTS, num_experts_per_tok=2, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
             expert_layer_period=2, expert_layer_offset=1, num_hidden_layers=4),
    ),
    # Beyond the common forty: newer, or of a layout that no family above has.
    "apertus": Family("Apertus", f"{ATTENTION} mlp.up_proj mlp.down_proj"),
    "afmoe": Family(
        "Arcee Trinity",
        (f"{ATTENTION} self_attn.gate_proj {GATED}",) + 2 * (f"{MOE} self_attn.gate_proj {SHARED_PLURAL}",),
        dict(**_FINE, num_dense_layers=1, head_dim=8, sliding_window=8),
    ),
    "biogpt": Family("BioGPT", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2"),
    "deepseek_v2": Family(
        "DeepSeek-V2", (f"{LATENT} {GATED}",) + 2 * (f"{LATENT} {EXPERTS_OF} {SHARED_PLURAL}",), {**_DEEPSEEK, "head_dim": 4}
    ),
    "diffllama": Family("DiffLlama", LLAMA),
    "ernie4_5_moe": Family(
        "ERNIE 4.5",
        (LLAMA,) + 2 * (f"{MOE} {SHARED_PLURAL}",),
        dict(moe_num_experts=EXPERTS, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1),
    ),
    "falcon_h1": Family(
        "Falcon-H1",
        f"{ATTENTION} {MAMBA} {FEED_FORWARD}",
        dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, head_dim=8),
    ),
    "falcon_mamba": Family("Falcon Mamba", "mixer.in_proj mixer.out_proj", dict(state_size=8)),
    "gemma4_text": Family(  # the last two blocks use the keys and values of the two before them
        "Gemma 4, text decoder",
        4 * (LLAMA,) + 2 * (f"self_attn.q_proj self_attn.o_proj {GATED}",),
        dict(
            global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64, num_kv_shared_layers=2,
            num_hidden_layers=6, layer_types=3 * ["sliding_attention", "full_attention"], sliding_window=8,
        ),
    ),
    "glm4_moe": Family(
        "GLM-4.5, 4.6",
        (LLAMA,) + 2 * (f"{MOE} {SHARED_PLURAL}",),
        dict(n_routed_experts=EXPERTS, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24,
             first_k_dense_replace=1, head_dim=8),
    ),
    "granitemoehybrid": Family(
        "Granite 4",
        tuple(
            f"{mixer} block_sparse_moe.experts.*.gate_up_proj block_sparse_moe.experts.*.down_proj "
            "shared_mlp.input_linear shared_mlp.output_linear"
            for mixer in (MAMBA, ATTENTION, MAMBA)
        ),
        dict(**_LOCAL, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, shared_intermediate_size=40,
             layer_types=["mamba", "attention", "mamba"]),
    ),
    "hunyuan_v1_moe": Family(
        "Hunyuan", f"{MOE} {SHARED}".replace("shared_expert", "shared_mlp"), dict(num_experts=EXPERTS, moe_topk=2, head_dim=8)
    ),
    "lfm2": Family(
        "LFM2",
        tuple(
            f"{mixer} feed_forward.w1 feed_forward.w2 feed_forward.w3"
            for mixer in ("conv.in_proj conv.out_proj", ATTENTION.replace("o_proj", "out_proj"), "conv.in_proj conv.out_proj")
        ),
        dict(layer_types=["conv", "full_attention", "conv"]),
    ),
    "minimax": Family(
        "MiniMax",
        tuple(
            f"{attention} {EXPERTS_OF}"
            for attention in (LIGHTNING, ATTENTION, LIGHTNING)
        ),
        dict(**_LOCAL, head_dim=8, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    ),
    "nemotron_h": Family(
        "Nemotron-H",
        (
            "mixer.in_proj mixer.out_proj",
            "mixer.q_proj mixer.k_proj mixer.v_proj mixer.o_proj",
            "mixer.up_proj mixer.down_proj",
            "mixer.experts.*.up_proj mixer.experts.*.down_proj mixer.shared_experts.up_proj mixer.shared_experts.down_proj",
        ),
        dict(layers_block_type=["mamba", "attention", "mlp", "moe"], n_routed_experts=EXPERTS, num_experts_per_tok=2,
             moe_intermediate_size=24, moe_shared_expert_intermediate_size=40, mamba_num_heads=4, mamba_head_dim=16,
             ssm_state_size=8, n_group=1, topk_group=1, n_groups=2, head_dim=8),
    ),
    "qwen3_5_text": Family(
        "Qwen3.5, text decoder", 3 * (f"{DELTA} {GATED}",) + (LLAMA,), dict(head_dim=8, num_hidden_layers=4, **_DELTA)
    ),
    "qwen3_5_moe_text": Family(
        "Qwen3.5-MoE, text decoder",
        3 * (f"{DELTA} {EXPERTS_OF} {SHARED}",) + (f"{MOE} {SHARED}",),
        dict(**_FINE, shared_expert_intermediate_size=40, head_dim=8, num_hidden_layers=4, **_DELTA),
    ),
    "xglm": Family(
        "XGLM", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2",
        dict(d_model=HIDDEN, num_layers=LAYERS, attention_heads=4, ffn_dim=48),
    ),
}  # fmt: skip
