import pytest
from conftest import make_model
from torch import distributed, nn
from torch.distributed.tensor import Shard, distribute_tensor

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning.context import check_model, check_pattern, check_weights
from optimum_neuronal.saliency.masks import ColumnPattern


def test_damaged_and_missing_weights_are_refused(llama):
    decoder = find_decoder(llama)
    projection = decoder.blocks[1].pruned[2]
    projection.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"weights of {projection.name} contain NaN"):
        check_weights(decoder.projections)
    with pytest.raises(ValueError, match="on the meta device: load them with from_pretrained"):
        meta = llama.to("meta")
        check_weights(find_decoder(meta).projections)


def test_weights_that_are_spread_over_processes_are_refused(llama):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        linear = llama.model.layers[1].mlp.up_proj
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.data, mesh, [Shard(0)]))
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj are spread over processes.*without tp_plan"):
            check_weights(find_decoder(llama).projections)
    finally:
        distributed.destroy_process_group()


def test_models_of_another_kind_are_refused(llama):
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        check_model(nn.Linear(2, 2))
    llama.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="is quantized"):
        check_model(llama)
    del llama.config.quantization_config
    llama.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="encoder-decoder"):
        check_model(llama)
    llama.peft_config = {}
    with pytest.raises(ValueError, match="merge_and_unload"):
        check_model(llama)


def test_rows_have_to_be_whole_groups_of_the_pattern():
    decoder = find_decoder(make_model("llama", intermediate_size=42))
    check_pattern(decoder.projections, None)
    check_pattern(decoder.projections, ColumnPattern(1, 2))
    message = (
        r"model\.layers\.0\.mlp\.down_proj has 42 input features, not a multiple of 4, so the pattern 2:4 does not fit"
    )
    with pytest.raises(ValueError, match=message):
        check_pattern(decoder.projections, ColumnPattern(2, 4))
