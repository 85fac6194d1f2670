import torch
from torch import nn

from optimum_neuronal.blocks.statistics import Hessian, SquaredNorms, activation, observe_inputs
from optimum_neuronal.topup.dsnot import InputSums


INPUTS = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [0.0, 1.0]]])


def test_hessian_and_moments_by_hand():
    hessian, moments = Hessian(), InputSums()
    for statistic in (hessian, moments):
        statistic.update(INPUTS, 2)
        assert statistic.value.tolist() == [[10.0, 20.0], [0.0, 2.0]] and statistic.tokens == 4
    assert hessian.hessian.tolist() == [[10.0, 14.0], [14.0, 22.0]]
    assert moments.sums.tolist() == [[4.0, 6.0], [0.0, 2.0]]


def test_only_the_routed_tokens_of_a_sequence_count():
    norms, hessian, moments = SquaredNorms(), Hessian(), InputSums()
    for statistic in (norms, hessian, moments):
        statistic.update_routed(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 4]), 5)
        statistic.update_routed(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), 5)
        assert statistic.value.tolist() == [[10.0, 20.0], [0.0, 0.0]] and statistic.tokens == 2
    assert hessian.hessian.tolist() == [[10.0, 14.0], [14.0, 20.0]]
    assert moments.sums.tolist() == [[4.0, 6.0], [0.0, 0.0]]


def test_no_bit_of_them_depends_on_the_batches():
    for statistic, field in [(SquaredNorms, "value"), (Hessian, "hessian"), (InputSums, "sums")]:
        inputs = torch.randn(6, 5, 9, generator=torch.Generator().manual_seed(0))
        results = []
        for batch in (1, 2, 4, 6):
            measured = statistic()
            for part in inputs.split(batch):
                measured.update(part, len(part))
            results.append(getattr(measured, field))
        assert all(torch.equal(results[0], other) for other in results)


def test_activation_is_wandas_running_mean():
    inputs = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(0))
    running = torch.zeros(3)
    for count, sequence in enumerate(inputs):
        running = running * count / (count + 1) + sequence.norm(dim=0) ** 2 / (count + 1)
    norms = SquaredNorms()
    norms.update(inputs, 4)
    torch.testing.assert_close(activation(norms.value), running.sqrt())


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs):
        return self.o(self.q(inputs) + self.k(inputs))


def test_shared_inputs_are_measured_once():
    class Counting(SquaredNorms):
        updates = 0

        def update(self, inputs, sequences):
            type(self).updates += 1
            super().update(inputs, sequences)

    module = _Shared()
    recorded = {}
    for _ in range(2):
        with torch.no_grad(), observe_inputs(dict(module.named_children()), recorded, (2, 3), Counting):
            module(torch.randn(2, 3, 4))
    assert recorded["q"] is recorded["k"] and recorded["q"] is not recorded["o"]
    assert Counting.updates == 4 and recorded["q"].value.shape == (4, 4)


def test_a_module_that_sees_only_some_tokens_is_not_measured():
    linear, recorded = nn.Linear(4, 4), {}
    with torch.no_grad(), observe_inputs({"experts.0": linear}, recorded, (2, 5)):
        linear(torch.ones(3, 4))
    assert recorded == {}
