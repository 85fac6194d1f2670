import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config.neuronal_config import Methods
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.plan import ColumnPattern
from optimum_neuronal.saliency.weight_scores import RIA, Wanda
from optimum_neuronal.topup import TOPUPS
from optimum_neuronal.topup.dsnot import AuthorsDSnoT
from optimum_neuronal.topup.uniform import Uniform


class TestMethodsThatGoTogether:
    @pytest.mark.parametrize("saliency", ["alps", "sparsegpt"])
    @pytest.mark.parametrize("topup", TOPUPS.names())
    def test_only_some_topups_need_fixed_weights(self, saliency, topup):
        if topup not in ("besa", "dsnot"):
            assert NeuronALConfig(sparsity=0.7, saliency=saliency, topup=topup).methods.topup
            return
        with pytest.raises(ValueError, match=f"{saliency!r} updates them: .*such as 'wanda'"):
            NeuronALConfig(sparsity=0.7, saliency=saliency, topup=topup)

    def test_a_pattern_raises_with_other_topups_and_sparsities(self):
        for topup in ("search", "dsnot"):
            with pytest.raises(ValueError, match=f"nothing for the top-up {topup!r} to decide: set topup='uniform'"):
                NeuronALConfig(sparsity=0.5, saliency="wanda", pattern="2:4", topup=topup)
        with pytest.raises(ValueError, match="The pattern 2:4 means sparsity=0.5, but it is 0.7: set sparsity=0.5"):
            NeuronALConfig(sparsity=0.7, pattern="2:4", topup="uniform", saliency="wanda")
        with pytest.raises(ValueError, match="expected 'N:M'"):
            NeuronALConfig(sparsity=0.5, pattern="2-4", topup="uniform", saliency="wanda")
        config = NeuronALConfig(sparsity=0.5, pattern="4:8", topup="uniform", saliency="wanda")
        assert NeuronALConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "saliency, topup, needed",
    [
        ("magnitude", "uniform", False),
        ("wanda", "uniform", True),
        ("magnitude", "owl", True),
        ("magnitude", "dsnot", True),  # its allocation asks nothing, but it exchanges weights
    ],
)
def test_what_looks_at_no_activation_needs_no_calibration(saliency, topup, needed):
    assert NeuronALConfig(0.7, saliency, topup=topup).methods.needs_calibration is needed


def test_methods_are_made_of_names_and_hyper_parameters():
    methods = NeuronALConfig(0.5, "ria", {"power": 1.0}, topup="uniform", pattern="2:4").methods
    assert methods == Methods(RIA(power=1.0), Uniform(), ColumnPattern.parse("2:4"))
    methods = NeuronALConfig(0.5, "alps", {"iterations": 7}, topup="uniform").methods
    assert methods == Methods(ALPS(iterations=7), Uniform())
    methods = NeuronALConfig(0.5, "wanda", topup="dsnot", topup_args={"cycles": 3, "variant": "authors"}).methods
    assert methods == Methods(Wanda(), AuthorsDSnoT(cycles=3))
