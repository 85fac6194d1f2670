"""Makes models with random weights to measure on."""

from transformers import LlamaConfig, LlamaForCausalLM


def random_llama(
    hidden_size: int, blocks: int, tokens: int, vocabulary: int = 1000, head_size: int = 64, **more
) -> LlamaForCausalLM:
    """A randomly initialised Llama with the proportions of Llama-2-7B.

    Args:
        hidden_size, blocks, vocabulary, head_size (`int`): its shape.
        tokens (`int`): the longest sequence.
        more: further fields of `LlamaConfig`.
    """
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=int(hidden_size * 2.6875),
        num_hidden_layers=blocks,
        num_attention_heads=max(1, hidden_size // head_size),
        max_position_embeddings=tokens,
        vocab_size=vocabulary,
        **more,
    )
    return LlamaForCausalLM(config).eval()
