from dataclasses import dataclass, field

import pytest
import torch

from optimum_neuronal.files.records import Records
from optimum_neuronal.saliency.plan import Plan
from optimum_neuronal.saliency.weight_scores import Wanda
from optimum_neuronal.trials import Cache, PlanEvaluator
from optimum_neuronal.trials.plan_evaluator import Measurement


ROWS = torch.tensor([0.25, 0.75], dtype=torch.float64)
HALF = Plan({"q": 0.5, "k": ROWS})


@dataclass(frozen=True)
class Counted(Measurement):
    """Answers with how often it was measured."""

    metric: str = "kl"
    label: str | None = field(default=None, compare=False)
    measured: list = field(default_factory=list, compare=False)

    def measure(self, evaluator, plans):
        self.measured.append(plans)
        return [len(self.measured)], {"count": torch.tensor([float(len(self.measured))])}

    def result(self, value, tensors):
        assert tensors["count"].tolist() == value
        return value


@dataclass(frozen=True)
class Another(Counted):
    pass


def trials_of(records=None, cache=None) -> PlanEvaluator:
    return PlanEvaluator(
        runner=None,
        saliency=Wanda(),
        ids=torch.zeros(4, 4),
        num_alignment_samples=2,
        records=records or Records(),
        cache=cache or Cache(),
    )


def test_a_recorded_answer_is_looked_up_and_without_records_it_is_measured_again(tmp_path):
    unrecorded, measurement = Counted(), Counted(label="shown")
    assert [trials_of().measure(unrecorded, [HALF]) for _ in range(2)] == [[1], [2]]
    trials_of(Records(tmp_path)).measure(measurement, [HALF])
    again = Counted(label="another label", measured=measurement.measured)
    assert trials_of(Records(tmp_path)).measure(again, [Plan(dict(HALF.sparsity))]) == [1] and len(again.measured) == 1


@pytest.mark.parametrize(
    ("measurement", "plans"),
    [
        (Counted("nll"), [HALF]),
        (Another(), [HALF]),
        (Counted(), [HALF, HALF]),
        (Counted(), [Plan({**HALF.sparsity, "q": 0.5000001})]),
        (Counted(), [Plan({**HALF.sparsity, "k": ROWS.flip(0)})]),
        (Counted(), [Plan({"v": 0.5, "k": ROWS})]),
    ],
)
def test_another_question_or_plan_has_a_record_of_its_own(measurement, plans, tmp_path):
    evaluator = trials_of(Records(tmp_path))
    evaluator.measure(Counted(), [HALF])
    evaluator.measure(measurement, plans)
    evaluator.measure(measurement, plans)
    assert len(measurement.measured) == 1


def test_what_the_dense_model_answers_is_shared_by_prunes_with_one_cache():
    measurement, cache = Counted(), Cache(lasting=True)
    for evaluator in (trials_of(cache=cache), trials_of(cache=cache)):
        assert evaluator.measure_once(measurement) == [1]
        cache.release()
    assert trials_of().measure_once(measurement) == [2]
