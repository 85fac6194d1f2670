import pytest
import torch
from forward import squared_norms
from sweeps import make_sweep, state, unchanged, uniform

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import activation
from optimum_neuronal.sparsity.masks import mask_rows


@pytest.mark.parametrize("saliency", ["wanda", "sparsegpt"])
def test_dense_blocks_receive_what_sparse_blocks_before_them_put_out(llama, ids, saliency):
    """By hand, one block after the other: weights that would be updated are pruned by their score alone."""
    with inference(llama):
        sweep = make_sweep(llama, ids, saliency)
        plan, before = uniform(sweep, 0.6), state(llama)
        per_block, output = sweep.engine.stream_of(plan)
        assert unchanged(llama, before)
        for block, found in zip(sweep.decoder.blocks, per_block):
            norms = squared_norms(llama, ids[:4], block.projections)
            for projection in block.pruned:
                torch.testing.assert_close(found[projection.name].value, norms[projection.name], rtol=1e-4, atol=1e-4)
                score = sweep.saliency.score(projection.weight, activation(found[projection.name].value))
                mask = mask_rows(score, plan.row_counts(projection.name, projection.shape))
                projection.weight.masked_fill_(~mask, 0)
        expected = llama.model(ids[:4]).last_hidden_state
        torch.testing.assert_close(llama.model.norm(torch.cat(list(output))), expected, rtol=1e-4, atol=1e-4)


def test_the_last_plans_stream_is_kept_until_it_is_let_go(llama, ids):
    with inference(llama):
        sweep, costs = make_sweep(llama, ids), []
        engine, first, second = sweep.engine, uniform(sweep), uniform(sweep)
        for ask in (first, first, second, second, first, None, first):
            before = engine.runner.block_forwards
            engine.release() if ask is None else engine.stream_of(ask)
            costs.append((engine.runner.block_forwards - before) // (4 * 3))
    assert costs == [2, 0, 2, 0, 2, 0, 2], "what it receives and what it puts out, of four sequences in three blocks"
