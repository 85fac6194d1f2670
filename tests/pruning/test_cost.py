import pytest
from conftest import make_model

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import dry_run
from optimum_neuronal.pruning.cost import forward_bytes, hidden_sequences
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.pruning.rates import Rates
from optimum_neuronal.trials.alignment import AlignmentPass
from optimum_neuronal.trials.output_errors import OutputPass

from .conftest import RATE, config_of, saved


pytestmark = pytest.mark.usefixtures("known_rate")


def test_operations_of_a_llama_by_hand(tmp_path, llama):
    """Hidden size 32, MLP 48, 3 blocks, 16 tokens."""
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform"))
    attention, gate_up, down = 4 * 32 * 32, 2 * 32 * 48, 48 * 32
    without_output = 2 * 16 * (attention + gate_up) + 4 * 16**2 * 32
    whole = without_output + 2 * 16 * down
    check, pruning = plan.sweeps
    assert check.operations == 3 * whole
    assert pruning.operations == 6 * (3 * without_output + 2 * whole)
    assert plan.seconds == (check.operations + pruning.operations) / RATE
    outputs = 3 * 16 * (5 * 32 + 2 * 48)  # three tensors of a forward for each
    assert check.made == 3 * outputs and pruning.made == 6 * (3 + 2) * outputs


def test_what_is_computed_one_by_one_takes_time(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(dry_run, "measure_rates", lambda *args: Rates(*7 * [float("inf")], 1e3))
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform"))
    assert plan.seconds == sum(sweep.made for sweep in plan.sweeps) / 1e3 > 0


def test_gradients_take_two_runs_more_and_a_mask_each(tmp_path, llama):
    """BESA: a step, with new masks, for both sequences in each of two epochs."""
    folder, _ = saved(tmp_path, llama)
    configs = (config_of(topup="besa", topup_args={"epochs": epochs}) for epochs in (2, 1))
    learning, once = (plan_prune(folder, config).sweeps[1] for config in configs)
    weights = 4 * 32 * 32 + 3 * 32 * 48
    assert learning.masked == 2 * once.masked == 2 * 2 * 3 * weights
    whole = 2 * 16 * weights + 4 * 16**2 * 32
    assert learning.operations - once.operations == 2 * 3 * 3 * whole
    assert learning.block_forwards - once.block_forwards == 2 * 3, "ways back are no runs"


def test_a_token_passes_through_its_own_experts_only(tmp_path):
    two, four = (
        plan_prune(saved(tmp_path, make_model("mixtral", num_experts_per_tok=k))[0], config_of(topup="uniform"))
        for k in (2, 4)
    )
    experts = sum(p.numel() for p in make_model("mixtral").model.layers[0].mlp.experts.parameters())
    assert four.sweeps[0].operations - two.sweeps[0].operations == 3 * 2 * 16 * experts // 2


@pytest.mark.parametrize("objective, distributions, held", [("kl", 17, 5), ("nll", 16, 2)])
def test_likelihood_is_compared_without_the_dense_model(objective, distributions, held, tmp_path, llama, monkeypatch):
    """A round of 16 candidates, on the logits of two sequences; in memory are those of one."""
    fields = {"topup": "search", "topup_args": {"objective": objective, "budget": 16, "rows": False}}
    monkeypatch.setattr(dry_run, "forward_bytes", lambda *args: 0)
    monkeypatch.setattr(dry_run, "RANKING", 0)
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(**fields))
    (search,) = (sweep for sweep in plan.sweeps if sweep.label == "Search")
    assert search.compared == distributions * 2 * 16 * llama.config.vocab_size
    assert plan.working_bytes == held * 16 * llama.config.vocab_size * 4


def test_a_batch_has_no_more_sequences_than_there_are(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(dry_run, "RANKING", 0)
    folder, _ = saved(tmp_path, llama)
    few, many = (plan_prune(folder, config_of(topup="uniform", num_samples=n)).working_bytes for n in (6, 10**6))
    assert few == forward_bytes(find_decoder(llama), 6 * 16, 4) < many


def test_hidden_states_are_those_of_the_greediest_pass():
    """Two plans around a block beside the first inputs, and three beside the dense model's last output too."""
    passes = [AlignmentPass("first", 2, "sparse-stream"), OutputPass("second", 3)]
    assert hidden_sequences(passes[:1], samples=6, alignment=2, blocks=3) == 2 + 2 * 2 * 2
    assert hidden_sequences(passes, samples=6, alignment=2, blocks=3) == 2 * 2 + 2 * 3 * 2
    assert hidden_sequences(passes, samples=6, alignment=2, blocks=1) == 2 * 2 + 2 * 3
    assert hidden_sequences([], samples=6, alignment=2, blocks=3) == 0
