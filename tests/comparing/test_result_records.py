import pytest
from conftest import make_model

from optimum_neuronal import compare
from optimum_neuronal.comparing.asked import Combination
from optimum_neuronal.comparing.result_records import ResultRecords
from optimum_neuronal.comparing.results import Result


@pytest.mark.parametrize("content", ["", "{}", '{"what": 1}', "[1, 2]"])
def test_a_damaged_record_is_made_anew(content, llama, others, tmp_path):
    first = compare(llama, saliencies=["magnitude"], topups=["uniform"], **others, output=tmp_path)
    for record in (tmp_path / "results").iterdir():
        record.write_text(content)
    second = compare(llama, saliencies=["magnitude"], topups=["uniform"], **others, output=tmp_path)
    assert second.results[0].perplexity == first.results[0].perplexity


@pytest.mark.parametrize("change", ["seed", "calibration", "test", "model"])
def test_what_depends_on_something_else_is_run_again(change, llama, ids, others, tmp_path):
    first = compare(llama, saliencies=["wanda"], topups=["uniform"], **others, output=tmp_path)
    if change == "seed":
        others["seed"] = 1
    elif change == "calibration":
        others["dataset"] = ids[1:7]
    elif change == "test":
        others["evaluate"] = {"test": ids[5:]}
    else:
        llama = make_model("llama", seed=1)
    second = compare(llama, saliencies=["wanda"], topups=["uniform"], **others, output=tmp_path)
    expected = 4 if change != "seed" else 3  # the dense model's figures do not depend on the config
    assert len(list((tmp_path / "results").iterdir())) == expected
    assert change == "seed" or first.results[0].perplexity != second.results[0].perplexity


class Make:
    """A result whose seconds are its number."""

    def __init__(self, error=None):
        self.calls, self.error = 0, error

    def __call__(self):
        self.calls += 1
        return Result(0.7, "wanda", "owl:m=7", {"test": 12.5}, pruning_seconds=self.calls, error=self.error)


ASKED = Combination(0.7, "wanda", "owl:m=7")


def test_a_finished_result_is_read_whole(tmp_path):
    make = Make()
    first, second = (ResultRecords(tmp_path, False, {"model": "a"}).get_or_make(ASKED, {}, make) for _ in range(2))
    assert first == second and make.calls == 1
    (record,) = (tmp_path / "results").iterdir()
    assert record.name.startswith("0.7-wanda-owl_m_7-") and record.suffix == ".json"
    ResultRecords(tmp_path, False, {"model": "a"}).get_or_make(ASKED._replace(value_bits=3), {}, make)
    assert any(path.name.startswith("0.7-wanda-owl_m_7-3bits-") for path in (tmp_path / "results").iterdir())


@pytest.mark.parametrize(
    "asked, config, depends_on",
    [
        (ASKED, {}, {"model": "b"}),
        (ASKED, {"seed": 1}, {"model": "a"}),
        (ASKED._replace(sparsity=0.6), {}, {"model": "a"}),
        (ASKED._replace(value_bits=4), {}, {"model": "a"}),
    ],
    ids=["model", "config", "sparsity", "bits"],
)
def test_what_depends_on_something_else_has_a_record_of_its_own(asked, config, depends_on, tmp_path):
    make = Make()
    ResultRecords(tmp_path, False, {"model": "a"}).get_or_make(ASKED, {}, make)
    ResultRecords(tmp_path, False, depends_on).get_or_make(asked, config, make)
    assert make.calls == 2 and len(list((tmp_path / "results").iterdir())) == 2


def test_failures_are_not_kept_and_nothing_is_without_a_directory(tmp_path):
    for output, error in ((tmp_path, "out of memory"), (None, None)):
        make = Make(error)
        for _ in range(2):
            ResultRecords(output, False, {}).get_or_make(ASKED, {}, make)
        assert make.calls == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "results"] and not list((tmp_path / "results").iterdir())


def test_what_is_recorded_may_be_made_again(tmp_path):
    make = Make()
    for overwrite in (False, True, False):
        found = ResultRecords(tmp_path, overwrite, {}).get_or_make(ASKED, {}, make)
    assert make.calls == 2 and found.pruning_seconds == 2
