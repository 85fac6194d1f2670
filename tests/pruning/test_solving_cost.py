"""What a dry run tells of solving: counted by hand, and against the tensors that really exist at a time."""

import pytest
import torch
from conftest import make_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import dry_run
from optimum_neuronal.pruning.dry_run import plan_prune
from optimum_neuronal.pruning.rates import Rates
from optimum_neuronal.pruning.solving_cost import FLOAT32, OTHERS, SQUARES, SolvingCost, solving_cost
from optimum_neuronal.saliency.alps import ALPS
from optimum_neuronal.saliency.rounding import PASSES
from optimum_neuronal.saliency.sparsegpt import SparseGPT
from optimum_neuronal.sparsity.masks import ColumnPattern
from optimum_neuronal.trials.applier import QUICK
from optimum_neuronal.trials.levels import level_sparsities, levels_bytes

from .conftest import RATE, config_of, saved


pytestmark = pytest.mark.usefixtures("known_rate")
WEIGHTS = 4 * 32 * 32 + 3 * 32 * 48  # of a block
ITERATIONS = {"saliency": "alps", "saliency_args": {"iterations": 6, "refinements": 1}}


def cost_of(model, **fields) -> SolvingCost:
    config = config_of(**fields)
    return solving_cost(find_decoder(model), config, config.make_methods(), config.seq_length)


def test_nothing_is_solved_where_weights_stay_as_they_are(llama, tmp_path):
    assert cost_of(llama, topup="search") == SolvingCost()
    text = str(plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform")))
    assert not any(word in text for word in ("solved", "solving", "levels", "kept weights", "refit"))


def test_one_solution_of_a_llama_by_hand(llama):
    """Six projections of a block have 32 inputs, 4 x 32 + 2 x 48 outputs of them; the last has 48 inputs."""
    cost = cost_of(llama, topup="uniform", **ITERATIONS)
    rounds, gathered = 6 + 1 + 2, 2 * 6 * 16
    solved = 2 * 32**2 * (4 * 32 + 2 * 48) * rounds + 2 * 48**2 * 32 * rounds  # products of every iteration
    factorised = 2 * (2 * 32**3) * 6 + 2 * (2 * 48**3)  # at every third
    assert cost.operations == 3 * (solved + factorised + gathered * (6 * 32**2 + 48**2))
    assert cost.made == 12 * 3 * WEIGHTS * 6, "in every iteration, to find the largest"
    assert (cost.sparsities, cost.levels_bytes) == (1, 0)
    assert cost.solver_bytes == 4 * (SQUARES * 48**2 + OTHERS * 32 * 48)
    assert cost.waiting_bytes == pytest.approx(0.3 * 3 * WEIGHTS * 4, abs=4)


ROWS, COLUMNS = [*4 * [32], *2 * [48], 32], [*6 * [32], 48]  # of the projections of a block
PRODUCTS = 3 * sum(2 * n * m * m for n, m in zip(ROWS, COLUMNS))  # of a sweep, in three blocks
FITTED = 3 * WEIGHTS * (8 + 1)  # for each of 8 tables of 3 bits, of so few rows all, and then once more


def test_rounding_to_few_bits_is_counted_by_hand(llama):
    plain, rounded = (cost_of(llama, topup="uniform", value_bits=bits, **ITERATIONS) for bits in (None, 3))
    assert rounded.operations - plain.operations == PASSES * PRODUCTS
    assert rounded.swept == PASSES * 3 * WEIGHTS
    assert rounded.fitted == FITTED + 3 * WEIGHTS, "and their codes are found again"
    assert plain.swept == plain.fitted == 0
    assert rounded.solver_bytes - plain.solver_bytes == 2 * 4 * WEIGHTS, "all of a block wait to be rounded"


def test_levels_are_rounded_too(llama):
    """Eight of them, with that of no zeros; each with fewer sweeps than the end."""
    plain, rounded = (cost_of(llama, topup="search", value_bits=bits, **ITERATIONS) for bits in (None, 3))
    sweeps = PASSES + 8 * QUICK
    assert rounded.swept == sweeps * 3 * WEIGHTS and rounded.fitted == 9 * FITTED + 3 * WEIGHTS
    once, gathered = cost_of(llama, topup="uniform", **ITERATIONS), 3 * 2 * 6 * 16 * (6 * 32**2 + 48**2)
    assert rounded.operations - plain.operations == sweeps * PRODUCTS + once.operations - gathered


def test_the_nearest_values_take_no_sweep(llama):
    cost = cost_of(llama, topup="search", value_bits=3)
    assert cost == SolvingCost(fitted=FITTED + 3 * WEIGHTS, waiting_bytes=cost.waiting_bytes)
    assert cost.waiting_bytes == pytest.approx(0.3 * 3 * WEIGHTS * 4, abs=4)


def test_inputs_are_looked_at_anew_for_what_a_refit_rounds(llama):
    fields = {"topup": "uniform", "num_samples": 16, "refit_epochs": 1, **ITERATIONS}
    plain, rounded = (cost_of(llama, value_bits=bits, **fields) for bits in (None, 3))
    gathered = 3 * 2 * 16 * 16 * (6 * 32**2 + 48**2)
    assert rounded.operations - plain.operations == PASSES * PRODUCTS + 4 * gathered


def test_the_time_of_rounding_is_told(llama, tmp_path, monkeypatch):
    """At two rates: of fitting scales, and of moving values."""
    monkeypatch.setattr(dry_run, "measure_rates", lambda *args: Rates(*5 * [float("inf")], 1e3, 1e2, float("inf")))
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="uniform", value_bits=3, **ITERATIONS))
    told = (FITTED + 3 * WEIGHTS) / 1e3 + PASSES * 3 * WEIGHTS / 1e2
    assert plan.seconds == pytest.approx(told) == plan.rounding_seconds
    assert "values rounded" in str(plan) and "to 3 bits" in str(plan)


def test_levels_are_solved_and_kept_too(llama):
    once, searched = (cost_of(llama, topup=topup, **ITERATIONS) for topup in ("uniform", "search"))
    levels = level_sparsities(0.7)
    assert searched.sparsities == 1 + len(levels) == 8
    gathered = 3 * 2 * 6 * 16 * (6 * 32**2 + 48**2)
    assert searched.operations == 8 * once.operations - 6 * gathered, "inputs are gathered twice"
    blocks = find_decoder(llama).blocks
    assert searched.levels_bytes == sum(levels_bytes(block, levels) for block in blocks)
    assert cost_of(llama, topup="search", topup_args={"levels": False}, **ITERATIONS) == once


def test_a_refit_holds_a_block_four_times(llama):
    cost = cost_of(llama, topup="uniform", num_samples=16, refit_epochs=1, **ITERATIONS)
    assert cost.solver_bytes == 4 * WEIGHTS * 4


def test_the_plan_counts_all_of_it(llama, tmp_path):
    plan = plan_prune(saved(tmp_path, llama)[0], config_of(topup="search", **ITERATIONS))
    solving = plan.solving
    assert plan.seconds == pytest.approx((plan.operations + solving.operations) / RATE)
    rest = plan.model_bytes + plan.trial_bytes + plan.hidden_bytes + plan.mask_bytes
    moment = max(solving.solver_bytes, plan.working_bytes)
    assert plan.memory_bytes == rest + moment + max(solving.levels_bytes, solving.waiting_bytes)
    text = str(plan)
    assert "at 8 sparsities" in text and all(f"- {name} " in text for name in ("solving", "levels", "kept weights"))
    assert plan.to_dict()["solving"]["levels_bytes"] == solving.levels_bytes


def test_a_large_layer_fits(tmp_path):
    """Hidden size 4096, width 14336: into 24 GB, the Hessians and all that the solver holds."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32}
    with torch.device("meta"):
        model = make_model("llama", **shape)
    assert 4e9 < cost_of(model, topup="uniform", saliency="alps").solver_bytes < 12e9


class Living(TorchDispatchMode):
    """The most bytes that tensors made in it have taken together."""

    def __init__(self):
        super().__init__()
        self.peak, self._made = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: (ref, size) for key, (ref, size) in self._made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return found


@pytest.mark.parametrize("method", [ALPS(iterations=7), SparseGPT()], ids=lambda method: method.name)
@pytest.mark.parametrize("shape", [(64, 192), (192, 64), (512, 64), (64, 512)], ids=str)
@pytest.mark.parametrize("sparsity, pattern", [(0.7, None), (0.5, ColumnPattern(2, 4))], ids=["whole", "2:4"])
def test_no_more_exists_at_a_time_than_is_told(method, shape, sparsity, pattern):
    """With targets from the dense model, the Hessians and the weight included."""
    rows, columns = shape
    with Living() as living:
        hessian = torch.eye(columns) + 1 / columns
        cross = hessian + 0.1 * torch.randn(columns, columns)
        weight = method.toward(torch.randn(rows, columns), hessian, cross, "fc1")
        method.prune_together({"fc1": weight}, hessian, {"fc1": sparsity}, pattern)
    told = FLOAT32 * (SQUARES * columns**2 + OTHERS * rows * columns)
    assert living.peak <= told
    assert living.peak > 0.7 * told or method.name == "sparsegpt", "which holds less"
