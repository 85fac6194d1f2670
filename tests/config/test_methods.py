import pytest

from optimum_neuronal import NeuronALConfig
from optimum_neuronal.config.neuronal_config import Methods
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.plan import ColumnPattern
from optimum_neuronal.saliency.ria import RIA
from optimum_neuronal.topup.uniform import Uniform


class TestMethodsThatGoTogether:
    @pytest.mark.parametrize("topup", ["besa", "dsnot"])
    def test_topups_that_need_fixed_weights_raise_with_sparsegpt(self, topup):
        with pytest.raises(ValueError, match="'sparsegpt' updates them: .*such as 'wanda'"):
            NeuronALConfig(sparsity=0.7, saliency="sparsegpt", topup=topup)

    @pytest.mark.parametrize("saliency", ["alps", "sparsegpt"])
    @pytest.mark.parametrize("topup", ["owl", "alpha_pruning", "dlp", "atp", "dsa", "evopress", "search"])
    def test_all_others_serve_those_that_update_weights(self, saliency, topup):
        assert NeuronALConfig(sparsity=0.7, saliency=saliency, topup=topup).methods.topup

    def test_alps_takes_the_row_step_but_no_topup_that_needs_fixed_weights(self):
        for steps in ("both", "row", "block"):
            assert NeuronALConfig(sparsity=0.7, saliency="alps", topup="neuronal", topup_args={"steps": steps})
        for topup in ("besa", "dsnot"):
            with pytest.raises(ValueError, match="'alps' updates them"):
                NeuronALConfig(sparsity=0.7, saliency="alps", topup=topup)

    def test_a_pattern_raises_with_other_topups_and_sparsities(self):
        with pytest.raises(ValueError, match="nothing for the top-up 'search' to decide: set topup='uniform'"):
            NeuronALConfig(sparsity=0.5, pattern="2:4", topup="search")
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
        ("magnitude", "dsnot", True),  # its allocation asks nothing, but it refines masks
    ],
)
def test_what_looks_at_no_activation_needs_no_calibration(saliency, topup, needed):
    assert NeuronALConfig(0.7, saliency, topup=topup).methods.needs_calibration is needed


def test_methods_are_made_of_names_and_hyper_parameters():
    methods = NeuronALConfig(0.5, "ria:power=1.0", topup="uniform", pattern="2:4").methods
    assert methods == Methods(RIA(power=1.0), Uniform(), ColumnPattern.parse("2:4"))
    methods = NeuronALConfig(0.5, "alps:iterations=7", topup="uniform").methods
    assert methods == Methods(ALPS(iterations=7), Uniform())
