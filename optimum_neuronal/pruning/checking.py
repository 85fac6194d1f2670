"""What can be known to be wrong with a model and a config before any long work."""

from transformers import PreTrainedModel

from ..checkpoint.sparsity_config import read_sparsity_config
from ..config import NeuronALConfig
from ..data.calibration import resolve_seq_length
from ..decoder.checking import check_model, check_pattern, check_weights
from ..decoder.finding import find_decoder
from ..decoder.projections import Decoder
from ..methods import Methods


def check(model: PreTrainedModel, config: NeuronALConfig, methods: Methods) -> Decoder:
    """Finds the decoder, and everything that can be known to be wrong before calibration data is loaded.

    Args:
        model (`PreTrainedModel`): a dense decoder model with its weights.
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned so; the message says what to do.
    """
    decoder = check_structure(model, config, methods)
    check_weights(decoder.projections)
    return decoder


def check_structure(model: PreTrainedModel, config: NeuronALConfig, methods: Methods) -> Decoder:
    """Finds the decoder, and what can be known to be wrong before the weights are loaded.

    Args:
        model (`PreTrainedModel`): a decoder model; its weights may still be on the meta device.
        config ([`NeuronALConfig`]): how to prune.
        methods ([`Methods`]): of the config.

    Raises:
        `ValueError`, `TypeError`: this model cannot be pruned so; the message says what to do.
    """
    check_model(model)
    if read_sparsity_config(model.config) is not None:
        raise ValueError(
            "The model is sparse already (model.config.sparsity_config). Load the dense model; or, to prune further, "
            "del model.config.sparsity_config first."
        )
    decoder = find_decoder(model, config.targets, config.ignore)
    methods.suited_to(decoder)
    check_pattern(decoder.projections, methods.pattern)
    resolve_seq_length(model.config, config.seq_length)
    return decoder
