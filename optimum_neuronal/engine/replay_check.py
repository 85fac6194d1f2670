"""Checks, before any long work, that a model computes what replaying its blocks computes."""

import re

import torch

from ..model.projections import Decoder
from .calls import Wrap, first_output, output_wrapper
from .capture import block_outputs, capture_inputs
from .offload import BlockLoader
from .passes import Pass, Runs
from .replay import replay


class CheckPass(Pass):
    """What [`check_replay`] costs: one sequence."""

    def runs(self, index: int, last: int) -> Runs:
        return 1, 0, 0

    @property
    def needs_dense(self) -> bool:
        return False

    def count_sequences(self, samples: int, alignment: int) -> int:
        return 1

    def hidden_sequences(self, samples: int, alignment: int, deep: bool) -> int:
        return 0  # fewer than any other question's


def check_replay(decoder: Decoder, ids: torch.Tensor, device: torch.device | str, loader: BlockLoader) -> Wrap:
    """Compares replaying the blocks, their inputs being recorded, with the decoder's own forward.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        ids (`Tensor` of int64, shape (1, tokens)): one sequence.
        device (`torch.device`): where the decoder expects token ids.
        loader ([`BlockLoader`]): brings the blocks' weights.

    Returns:
        How a block's output is made of hidden states, see [`output_wrapper`].

    Raises:
        `ValueError`: they differ, so the family is not understood; a projection is not used as one; or the
            activations are not finite.
    """
    begin, end = block_outputs(decoder, [decoder.blocks[0], decoder.blocks[-1]], ids.to(device))
    wrap, expected = output_wrapper(begin), first_output(end)
    if not bool(torch.isfinite(expected).all()):
        raise ValueError(
            "The model's own activations contain NaN or infinity on the first calibration sequence: load it in "
            f"bfloat16 or float32 (it is {expected.dtype})."
        )
    inputs = capture_inputs(decoder, ids, 1, device, wrap=wrap)
    hidden = inputs.hidden
    for index, calls in enumerate(inputs.calls):
        with loader.loaded(index) as block:
            hidden, norms = replay(block, hidden, calls)
        for name in block.pruned_names:
            if name not in norms:
                raise ValueError(
                    f"{name} takes no part in the model's forward, or receives only some of the tokens (a mixture of "
                    f"experts of a kind that is not understood): leave it out with ignore=[{re.escape(name)!r}]."
                )
    difference, largest = (hidden[0] - expected).abs().max(), expected.abs().max()
    if not difference <= 1e-3 * largest:
        raise ValueError(
            f"Replaying the blocks ({type(decoder.blocks[0].module).__name__}) does not give what the model computes: "
            f"the largest difference is {difference:.3g}, where the largest output is {largest:.3g}. Were the wrong "
            "modules taken for the blocks, name the list with optimum_neuronal.register_architecture(model_type, "
            f"Architecture(blocks='layers')), model_type being {decoder.config.model_type!r}; else this model family "
            "is not supported."
        )
    return wrap
