import pytest
import torch

from optimum_neuronal.files.journal import Journal
from optimum_neuronal.sparsity.plan import SparsityPlan
from optimum_neuronal.system.processes import Processes
from optimum_neuronal.trials.records import Kept, StepRecords


HALF = SparsityPlan({"q": 0.5, "k": torch.tensor([0.25, 0.75], dtype=torch.float64)})


class Measure:
    """Finds its number of calls, and keeps the runs that it was given."""

    def __init__(self):
        self.runs = []

    def __call__(self, run):
        self.runs.append(run)
        return [len(self.runs)], {"found": torch.tensor([float(len(self.runs))])}


class Second(Processes):
    """The second of two processes, as if the first had sent what this one has."""

    def __init__(self):
        super().__init__(rank=1, count=2)

    def from_first(self, value):
        return value


def test_without_a_journal_every_step_is_measured():
    records, measure = StepRecords(), Measure()
    assert [records.once([HALF], ("kl",), measure)[0] for _ in range(2)] == [[1], [2]]


def test_a_finished_step_is_looked_up(tmp_path):
    measure = Measure()
    StepRecords(Journal(tmp_path)).once([HALF], ("kl",), measure)
    value, tensors = StepRecords(Journal(tmp_path)).once([SparsityPlan(dict(HALF.sparsity))], ("kl",), measure)
    assert value == [1] and tensors["found"].tolist() == [1] and len(measure.runs) == 1


@pytest.mark.parametrize(
    "plans, asked",
    [
        ([HALF], ("nll",)),
        ([HALF, HALF], ("kl",)),
        ([SparsityPlan({**HALF.sparsity, "q": 0.5000001})], ("kl",)),
        ([SparsityPlan({**HALF.sparsity, "k": torch.tensor([0.75, 0.25], dtype=torch.float64)})], ("kl",)),
        ([SparsityPlan({"v": 0.5, "k": HALF.sparsity["k"]})], ("kl",)),
    ],
    ids=["asked", "plans", "sparsity", "rows", "name"],
)
def test_another_question_is_another_step(plans, asked, tmp_path):
    records, measure = StepRecords(Journal(tmp_path)), Measure()
    records.once([HALF], ("kl",), measure)
    assert records.once(plans, asked, measure)[0] == [2]


def test_the_record_of_the_run_is_dropped_when_the_step_is_finished(tmp_path):
    journal = Journal(tmp_path)
    records = StepRecords(journal)

    def measure(run):
        journal.put(run._name, {"blocks": 1})
        if not journal.get("fail"):
            raise ConnectionError
        return 1, {}

    with pytest.raises(ConnectionError):
        records.once([HALF], ("kl",), measure)
    assert [path.name.endswith("-unfinished.record.safetensors") for path in tmp_path.glob("step-*")] == [True]
    journal.put("fail", True)
    assert records.once([HALF], ("kl",), measure)[0] == 1
    assert [path.name.endswith("-unfinished.record.safetensors") for path in tmp_path.glob("step-*")] == [False]


def test_of_several_processes_the_first_records(tmp_path):
    records, measure = StepRecords(Journal(tmp_path), Second()), Measure()
    assert records.once([HALF], ("kl",), measure)[0] == [1]
    assert not list(tmp_path.glob("step-*"))
    assert measure.runs[0]._name == "", "streams of one of several processes are recorded by none"


@pytest.mark.parametrize("lasting, again", [(False, "made anew"), (True, "made")])
def test_what_is_kept_is_made_once_until_it_is_let_go(lasting, again):
    kept = Kept(lasting)
    assert kept.get("key", lambda: "made") == "made"
    assert kept.get("key", lambda: "never asked") == "made" and kept.get("other", lambda: "else") == "else"
    kept.release()
    assert kept.get("key", lambda: "made anew") == again
