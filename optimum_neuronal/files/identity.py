"""What unfinished work depends on: checksums of a model and of token ids, and the versions of libraries."""

import hashlib
import json
import platform
from collections.abc import Sequence

import torch
import transformers
from transformers import PreTrainedModel

from .. import __version__
from ..compat import hf_private


def checksum_ids(ids: torch.Tensor) -> str:
    """Return a checksum of token ids, int64."""
    return hashlib.sha256(ids.contiguous().numpy().tobytes()).hexdigest()


def checksum(model: PreTrainedModel, names: Sequence[str] = ()) -> str:
    """Return a checksum of a model's config and weights, and of the names of its projections.

    Only the first and last row of each matrix are read.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in hf_private.FILE_KEYS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr(list(names)).encode())
    for name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            offloaded = hf_private.is_offloaded(module)
            weight = hf_private.offload_hook(module).weights_map[local] if offloaded else parameter
            if weight.is_meta:
                continue
            digest.update(f"{name}.{local} {tuple(weight.shape)} {weight.dtype}".encode())
            places = [(end,) * (weight.ndim - 1) for end in (0, -1)]
            for row in (weight[place] for place in places):
                digest.update(row.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that decide its results."""
    return {
        "optimum_neuronal": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
