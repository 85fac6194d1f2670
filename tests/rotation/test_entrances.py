"""Models that also read images: what writes into the stream from outside is rotated with it."""

import pytest
import torch
import transformers as t
from kinds import DECODER, QWEN2_VL, VISION
from profiles import by_day
from sweeps import state, unchanged
from turning import parts_of, random_rotations, uneven

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.blocks.block_inputs import inference
from optimum_neuronal.model import architectures
from optimum_neuronal.model.architectures import Architecture
from optimum_neuronal.rotation.merging import Originals


IMAGE = 200  # token id
LLAMA, MISTRAL, QWEN2 = t.LlamaConfig(**DECODER), t.MistralConfig(**DECODER), t.Qwen2Config(**DECODER)
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
PIXTRAL = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
    image_size=16,
    patch_size=4,
)
INTERN = {**VISION, "image_size": [16, 16], "patch_size": [8, 8]}
SIGLIP = dict(VISION, model_type="idefics3_vision")
QWEN2_5 = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    patch_size=4,
    out_hidden_size=32,
    fullatt_block_indexes=[1],
    window_size=16,
)

# Class of transformers -> its config, how many tokens an image is, and the image.
MODELS = {
    "LlavaForConditionalGeneration": (
        t.LlavaConfig(text_config=LLAMA, vision_config=t.CLIPVisionConfig(**VISION), image_token_id=IMAGE),
        4,
        {"pixel_values": (1, 3, 16, 16)},
    ),
    "VipLlavaForConditionalGeneration": (
        t.VipLlavaConfig(
            text_config=LLAMA, vision_config=t.CLIPVisionConfig(**VISION), image_token_index=IMAGE, image_token_id=IMAGE,
            vision_feature_layers=[-1, -2],
        ),
        4,
        {"pixel_values": (1, 3, 16, 16)},
    ),
    "Mistral3ForConditionalGeneration": (
        t.Mistral3Config(text_config=MISTRAL, vision_config=t.PixtralVisionConfig(**PIXTRAL), image_token_id=IMAGE, image_token_index=IMAGE),
        4,
        {"pixel_values": (1, 3, 16, 16), "image_sizes": [[16, 16]]},
    ),
    "InternVLForConditionalGeneration": (
        t.InternVLConfig(text_config=QWEN2, vision_config=INTERN, image_token_id=IMAGE),
        1,
        {"pixel_values": (1, 3, 16, 16)},
    ),
    "Idefics3ForConditionalGeneration": (
        t.Idefics3Config(text_config=LLAMA, vision_config=VISION, image_token_id=IMAGE, scale_factor=2),
        1,
        {"pixel_values": (1, 1, 3, 16, 16)},
    ),
    "SmolVLMForConditionalGeneration": (
        t.SmolVLMConfig(text_config=LLAMA, vision_config=VISION, image_token_id=IMAGE, scale_factor=2),
        1,
        {"pixel_values": (1, 1, 3, 16, 16)},
    ),
    "Qwen2VLForConditionalGeneration": (
        t.Qwen2VLConfig(**QWEN2_VL),
        1,
        {"pixel_values": (4, 96), "image_grid_thw": [[1, 2, 2]]},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        t.Qwen2_5_VLConfig(
            text_config=dict(DECODER, rope_parameters=ROPE), vision_config=QWEN2_5, image_token_id=IMAGE, video_token_id=201,
            vision_start_token_id=202, vision_end_token_id=203,
        ),
        1,
        {"pixel_values": (4, 96), "image_grid_thw": [[1, 2, 2]]},
    ),
}  # fmt: skip


def make(name, **fields):
    """The model, and tokens with an image among them."""
    config, tokens, image = MODELS[name]
    torch.manual_seed(0)
    model = uneven(getattr(t, name)(type(config).from_dict({**config.to_dict(), **fields})).eval())
    ids = torch.randint(3, 199, (1, 12))
    ids[0, 2 : 2 + tokens] = IMAGE
    inputs = {
        key: torch.randn(value) if key == "pixel_values" else torch.tensor(value) for key, value in image.items()
    }
    kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if "image_grid_thw" in image else {}
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs, **kinds}


def logits(model, inputs):
    with inference(model):
        return model(**inputs, use_cache=False).logits.double()


BY_DAY = ("LlavaForConditionalGeneration", "Idefics3ForConditionalGeneration", "Qwen2VLForConditionalGeneration")


@pytest.mark.parametrize("name", by_day(MODELS, *BY_DAY))
def test_the_function_of_text_and_image_stays(name):
    model, inputs = make(name)
    before, expected, parts = state(model), logits(model, inputs), parts_of(model)
    other = {**inputs, "pixel_values": torch.randn_like(inputs["pixel_values"])}
    assert float((logits(model, other) - expected).abs().max() / expected.std()) > 1e-2, "the image matters"
    assert parts.rotates_stream and parts.entrance is not None
    originals = Originals(parts)
    originals.merge(random_rotations(parts))
    assert float((logits(model, inputs) - expected).abs().max() / expected.std()) < 2e-5
    originals.restore()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", by_day(BY_DAY, "LlavaForConditionalGeneration"))
@pytest.mark.parametrize("tied", by_day([False, True], True))
def test_it_is_pruned_and_saved(name, tied, ids, tmp_path):
    """With a head of its own, and all weights as they are when it is loaded again."""
    model, _ = make(name, tie_word_embeddings=tied)
    rotation = {"rotate": True, "rotate_args": {"steps": 3, "fisher_samples": 2}}
    pruner = NeuronALPruner(
        NeuronALConfig(0.5, "wanda", topup="uniform", num_samples=12, num_alignment_samples=2, **rotation)
    )
    pruner.prune(model, ids + 3)
    assert pruner.report.rotation["stream"] and pruner.report.rotation["unties_head"] is tied
    pruner.save(model, tmp_path)
    reloaded = getattr(t, name).from_pretrained(tmp_path)
    assert unchanged(reloaded, state(model))
    assert reloaded.get_output_embeddings().weight is not reloaded.get_input_embeddings().weight


@pytest.mark.parametrize("end", [None, "linear", "multi_modal_projector.act", "linear_1.bias"])
def test_without_one_linear_layer_the_heads_alone_are_rotated(end, monkeypatch):
    """No name, a name of no layer, of none that is linear."""
    monkeypatch.setitem(architectures._ARCHITECTURES, "llava", Architecture(entrance=end))
    parts = parts_of(make("LlavaForConditionalGeneration")[0])
    assert not parts.rotates_stream and parts.entrance is None
