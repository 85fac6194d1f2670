import pytest
from forward import squared_norms
from sweeps import make_sweep

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import activation


def test_dense_scores_are_those_of_all_sequences(llama, ids):
    with inference(llama):
        sweep = make_sweep(llama, ids)
        names = [block.pruned_names[0] for block in sweep.decoder.blocks]
        scores = sweep.dense_scores(lambda block, a: [a[block.pruned_names[0]].sum().item()], "Scores")
        expected = squared_norms(llama, ids, sweep.decoder.projections)
    for (score,), name in zip(scores, names):
        assert score == pytest.approx(activation(expected[name]).sum().item(), rel=1e-5)
    assert sweep.engine.runner.block_forwards == 12 * 3
