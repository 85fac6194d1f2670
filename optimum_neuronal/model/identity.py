"""Checksums of all that a prune depends on: an unfinished prune is resumed only if they are equal."""

import hashlib
import json
import platform

import torch
import transformers
from transformers import PreTrainedModel

from ..compat import transformers as internals
from ..compat.accelerate import execution_device
from ..version import __version__
from .projections import Decoder


def identity(model: PreTrainedModel, decoder: Decoder, ids: torch.Tensor) -> dict[str, str]:
    """Return checksums of a model and of its calibration data.

    Args:
        model (`PreTrainedModel`): dense.
        decoder ([`Decoder`]): its blocks and projections.
        ids (`Tensor` of int64, shape (sequences, tokens)): all calibration sequences.

    Returns:
        `dict[str, str]`: `model`: of its config, of names, shapes and dtypes, and of the first and the last row of
            every projection that is pruned; `calibration data`: of all token ids; `device`: the kind that computes.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in internals.OF_THE_FILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, projection in decoder.projections.items():
        weight = projection.stored_weight
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for row in (weight[0], weight[-1]):
            digest.update(row.detach().float().cpu().contiguous().numpy().tobytes())
    return {
        "model": digest.hexdigest(),
        "calibration data": hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest(),
        "device": execution_device(next(iter(decoder.projections.values())).module).type,
    }


def versions() -> dict[str, str]:
    """Package -> version: of this package and of what decides its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
