import pytest
import torch
from sweeps import build_sweep, make_sweep

from optimum_neuronal.engine.capture import inference
from optimum_neuronal.engine.statistics import Hessian, SquaredNorms
from optimum_neuronal.engine.streams import Stream
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.saliency.wanda import Wanda
from optimum_neuronal.system.processes import Processes


def test_the_dense_model_runs_once_for_each_statistic_until_it_is_let_go(llama, ids):
    with inference(llama):
        engine, costs = make_sweep(llama, ids).engine, []
        for ask in (None, SquaredNorms, Hessian, None, "release", None):
            before = engine.runner.block_forwards
            found = engine.release() if ask == "release" else engine.dense(ask)
            costs.append((engine.runner.block_forwards - before) // (4 * 3))
            if ask is Hessian:
                assert found.norms[0]["model.layers.0.mlp.up_proj"].hessian.shape == (32, 32)
    assert costs == [1, 0, 1, 0, 0, 1], "of four sequences in three blocks"


def test_norms_are_the_dense_models_or_those_of_the_hidden_states_at_hand(llama, ids):
    with inference(llama):
        engine = make_sweep(llama, ids).engine
        inputs, block = engine.alignment_inputs(), engine.decoder.blocks[0]
        twice = Stream([2 * states for states in inputs.hidden])
        dense, own = (
            engine.reference_norms(reference, 0, block, twice, inputs.calls[0])["model.layers.0.self_attn.o_proj"]
            for reference in ("dense", "sparse-stream")
        )
        expected = engine.runner.inputs_of(block, twice, inputs.calls[0])["model.layers.0.self_attn.o_proj"]
    assert dense is engine.dense().norms[0]["model.layers.0.self_attn.o_proj"]
    assert torch.equal(own.value, expected.value) and not torch.equal(own.value, dense.value)


class Second(Processes):
    """The second of two processes; the first has the same rows, and a token less."""

    def __init__(self):
        super().__init__(rank=1, count=2)
        object.__setattr__(self, "joined", [])

    def join(self, rows, length):
        self.joined.append(length)
        return torch.cat([rows, rows])

    def collect(self, dealt):
        return [dealt[0] - 1, *dealt]


@pytest.mark.parametrize("statistic, sequences", [(SquaredNorms, 6), (Hessian, 12)])
def test_processes_share_sequences_unless_sums_would_depend_on_it(llama, ids, statistic, sequences):
    with inference(llama):
        engine = build_sweep(find_decoder(llama), Wanda(), ids, 4, processes=Second()).engine
        inputs = engine.capture_all(statistic)
        expected = engine.runner.capture(ids[-sequences:]).hidden
    assert len(inputs.hidden) == sequences
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(inputs.hidden, expected))


def test_norms_of_all_processes_come_together_once_for_those_that_share_them(llama, ids):
    engine = build_sweep(find_decoder(llama), Wanda(), ids, 4, processes=Second()).engine
    shared, own = SquaredNorms.of(torch.tensor([[1.0]]), 5), SquaredNorms.of(torch.tensor([[2.0]]), 3)
    joined = engine.joined({"q": shared, "k": shared, "down": own}, SquaredNorms)
    assert joined["q"] is joined["k"] and joined["q"].tokens == 4 + 5 and joined["down"].tokens == 2 + 3
    assert joined["q"].value.tolist() == [[1], [1]] and joined["down"].value.tolist() == [[2], [2]]
    assert engine.processes.joined == [12, 12]
    norms = {"q": shared}
    assert engine.joined(norms, Hessian) is norms
