import pytest
import torch
from conftest import make_model, memory_of
from profiles import by_day
from safetensors.torch import load_file, save_file
from several_processes import in_processes
from trial_helpers import same_state

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common.processes import Processes
from optimum_neuronal.pruning import prune


LAMBDAS = {"block_lambdas": [0.05, 0.1, 0.15], "row_lambdas": [0, 0.1]}
FIELDS = {"topup": "neuronal", "num_samples": 12, "num_alignment_samples": 4, "topup_args": LAMBDAS}


def test_candidates_are_dealt_and_sequences_are_parted():
    hands = [Processes(rank, 3).deal("abcdefgh") for rank in range(3)]
    assert hands == [list("adg"), list("beh"), list("cf")]
    parts = [Processes(rank, 3).part(8) for rank in range(3)]
    assert [list(range(8))[part] for part in parts] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert Processes().deal([1, 2]) == [1, 2] and not Processes(0, 4).splits(3), "too few to share"
    assert Processes().collect([1, 2]) == [1, 2] and Processes().from_first("mine") == "mine"


def _prune(rank, count, folder, family, ids, fields):
    model, memory = make_model(family), memory_of(fields := dict(fields))
    pruner = NeuronALPruner(NeuronALConfig(0.7, **{"saliency": "wanda", **FIELDS, **fields}))
    pruner.prune(model, ids, folder / f"work{count}", **memory)
    state = {key: value.contiguous().clone() for key, value in model.state_dict().items()}
    save_file(state, folder / f"{count}-{rank}.safetensors", {"lambda": str(pruner.report.block_lambda)})
    (folder / f"{count}-{rank}.forwards").write_text(str(pruner.report.block_forwards))
    pruner.save(model, folder / f"saved{count}")


# Levels on disk: of the first process in its work_dir, of the others in folders of their own.
ON_DISK = {"saliency": "alps", "saliency_args": {"iterations": 6}, "max_hidden_bytes": 0}
SEARCH = {"topup": "search", "topup_args": {"budget": 30}}


@pytest.mark.parametrize(
    "family, fields, counts",
    [
        ("llama", {}, (1, 2, 4)),
        ("llama", {"topup_args": {**LAMBDAS, "reference": "dense"}}, by_day((1, 2, 4), 1, 2)),
        ("llama", SEARCH, by_day((1, 2, 4), 1, 2)),
        ("mixtral", {"min_expert_tokens": 20}, by_day((1, 2, 4), 1, 2)),
        ("llama", {**ON_DISK, **SEARCH}, by_day((1, 2, 4), 1, 2)),
    ],
)
def test_the_same_masks_for_any_number_of_processes(tmp_path, family, fields, counts, ids):
    for count in counts:
        in_processes(count, _prune, tmp_path, tmp_path, family, ids, fields)
        assert (tmp_path / f"saved{count}" / "model.safetensors").exists()
    expected = load_file(tmp_path / "1-0.safetensors")
    for path in tmp_path.glob("*-*.safetensors"):
        found = load_file(path)
        assert all(torch.equal(value, found[key]) for key, value in expected.items()), path.name
    forwards = [int((tmp_path / f"{count}-0.forwards").read_text()) for count in counts]
    assert all(fewer < more for more, fewer in zip(forwards, forwards[1:])), "each does its share"


def _stop_after_the_search(rank, count, folder, ids):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(prune, "prune_blocks", lambda *_args: 1 / 0)
        NeuronALPruner(NeuronALConfig(0.7, "wanda", **FIELDS)).prune(make_model("llama"), ids, folder / "work")


def test_a_prune_goes_on_with_another_number_of_processes(tmp_path, ids):
    pruner = NeuronALPruner(NeuronALConfig(0.7, "wanda", **FIELDS))
    expected = pruner.prune(make_model("llama"), ids).state_dict()
    in_processes(2, _stop_after_the_search, tmp_path, tmp_path, ids)
    assert len(list((tmp_path / "work").glob("step-*"))) == 3
    assert same_state(pruner.prune(make_model("llama"), ids, tmp_path / "work"), expected)
