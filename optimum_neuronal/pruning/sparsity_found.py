"""The sparsity that a model has: zeros counted in its weights."""

from ..decoder.projections import Decoder
from ..engine.offload import BlockLoader
from ..sparsity.plan import row_sparsity


def measure_sparsity(
    decoder: Decoder, loader: BlockLoader | None = None
) -> tuple[float, dict[str, float], dict[str, dict[str, float]]]:
    """Counts the zeros in the weights.

    Args:
        decoder ([`Decoder`]): the model's blocks and projections.
        loader ([`BlockLoader`], *optional*): brings offloaded weights.

    Returns:
        `tuple`: share of zeros in all pruned projections; by block; and by projection with its extreme rows.
    """
    projections: dict[str, dict[str, float]] = {}
    blocks: dict[str, float] = {}
    zeros = weights = 0
    loader = loader or BlockLoader(decoder.blocks)
    for index in range(len(decoder.blocks)):
        block_zeros = block_weights = 0
        with loader.loaded(index) as block:
            for projection in block.pruned:
                rows = row_sparsity(projection.weight).cpu()
                out_features, in_features = projection.shape
                projections[projection.name] = {
                    "sparsity": rows.mean().item(),
                    "smallest_row": rows.min().item(),
                    "largest_row": rows.max().item(),
                }
                block_zeros += round((rows * in_features).sum().item())
                block_weights += out_features * in_features
        if block_weights:
            blocks[block.name] = block_zeros / block_weights
        zeros, weights = zeros + block_zeros, weights + block_weights
    return zeros / weights, blocks, projections
