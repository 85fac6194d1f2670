"""Tiny models of other kinds than language models: encoders, other heads, several modalities. In float32, on the CPU."""

import torch
import transformers as t


ENCODER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=256, max_position_embeddings=66
)  # fmt: skip
DECODER = dict(ENCODER, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
VISION = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
)
DISTILBERT = dict(dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=256)
MODERNBERT = dict(DECODER, cls_token_id=1, sep_token_id=2, local_attention=8, global_attn_every_n_layers=2)
QWEN2_VL = dict(
    text_config=dict(DECODER, rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)),
    vision_config=dict(depth=3, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4),
    image_token_id=200, video_token_id=201, vision_start_token_id=202, vision_end_token_id=203,
)  # fmt: skip
GEMMA3 = dict(
    text_config=dict(DECODER, head_dim=8, sliding_window=8), vision_config=VISION, mm_tokens_per_image=4,
    image_token_index=200, boi_token_index=201, eoi_token_index=202,
)  # fmt: skip
LLAVA = dict(text_config=t.LlamaConfig(**DECODER), vision_config=t.CLIPVisionConfig(**VISION), image_token_id=200)
MLLAMA = dict(  # text skips the cross-attention of the last block
    text_config=dict(DECODER, cross_attention_layers=[1]),
    vision_config=dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_global_layers=1, attention_heads=2, image_size=16,
        patch_size=8, vision_output_dim=32, intermediate_layers_indices=[1], max_num_tiles=1, supported_aspect_ratios=[[1, 1]],
    ),
    image_token_index=200,
)  # fmt: skip
WHISPER = dict(
    vocab_size=256, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# Name of a class of transformers -> its config.
ENCODERS = {
    "BertForMaskedLM": (t.BertConfig, ENCODER),
    "BertModel": (t.BertConfig, ENCODER),
    "BertForSequenceClassification": (t.BertConfig, ENCODER),
    "RobertaForMaskedLM": (t.RobertaConfig, ENCODER),
    "XLMRobertaForTokenClassification": (t.XLMRobertaConfig, ENCODER),
    "ElectraForPreTraining": (t.ElectraConfig, ENCODER),
    "DistilBertForMaskedLM": (t.DistilBertConfig, DISTILBERT),
    "ModernBertForMaskedLM": (t.ModernBertConfig, MODERNBERT),
    "ModernBertForSequenceClassification": (t.ModernBertConfig, MODERNBERT),
}
OTHER_HEADS = {
    "LlamaForSequenceClassification": (t.LlamaConfig, dict(DECODER, num_labels=3)),
    "Qwen2ForSequenceClassification": (t.Qwen2Config, dict(DECODER, num_labels=1)),  # what reward models are
    "MistralForTokenClassification": (t.MistralConfig, DECODER),
    "Qwen3Model": (t.Qwen3Config, dict(DECODER, head_dim=8)),  # what embedding models are
}
MULTIMODAL = {
    "LlavaForConditionalGeneration": (t.LlavaConfig, LLAVA),
    "Qwen2VLForConditionalGeneration": (t.Qwen2VLConfig, QWEN2_VL),
    "Gemma3ForConditionalGeneration": (t.Gemma3Config, GEMMA3),
    "MllamaForConditionalGeneration": (t.MllamaConfig, MLLAMA),
}
UNSUPPORTED = {
    "ViTForImageClassification": (t.ViTConfig, VISION),
    "WhisperForConditionalGeneration": (t.WhisperConfig, WHISPER),
    "T5ForConditionalGeneration": (t.T5Config, dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, vocab_size=256)),
}
KINDS = {**ENCODERS, **OTHER_HEADS, **MULTIMODAL, **UNSUPPORTED}


def make_config(name: str) -> t.PreTrainedConfig:
    kind, fields = KINDS[name]
    return kind(**fields, architectures=[name])


def make_kind(name: str) -> t.PreTrainedModel:
    """A randomly initialised model; larger weights than usual, so that blocks matter."""
    torch.manual_seed(0)
    model = getattr(t, name)(make_config(name))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()
