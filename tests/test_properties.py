"""What holds for all configs, for all files, and wherever a run is interrupted."""

import json
import shutil
from contextlib import suppress

import pytest
import torch
from conftest import make_model
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from sparse_checkpoints import save_pruned
from trial_helpers import same_state, state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, convert_checkpoint, inspect_checkpoint, keep_sparsity
from optimum_neuronal.blocks.runner import BlockRunner
from optimum_neuronal.saliency import SALIENCIES
from optimum_neuronal.topup import TOPUPS


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SENSIBLE = {
    "sparsity": st.floats(0, 0.99),
    "saliency": st.sampled_from(SALIENCIES.names()),
    "topup": st.sampled_from(TOPUPS.names()),
    "num_samples": st.integers(1, 300),
    "num_alignment_samples": st.integers(1, 16),
    "seq_length": st.none() | st.integers(2, 4096),
    "seed": st.integers(0, 2**40),
    "ignore": st.none() | st.lists(st.sampled_from(["q_proj", "down", "layers.[0-3]"]), max_size=2),
    "pattern": st.sampled_from([None, None, "2:4", "4:8", "4:2"]),
    "refit_epochs": st.integers(0, 3),
}
OTHERS = {name: value for name, value in SENSIBLE.items() if name != "sparsity"}
REQUIRED = {"sparsity": SENSIBLE["sparsity"]}
FIELDS = st.fixed_dictionaries(REQUIRED, optional=OTHERS) | st.fixed_dictionaries(
    {"sparsity": SENSIBLE["sparsity"] | ANYTHING}, optional={name: value | ANYTHING for name, value in OTHERS.items()}
)


@examples(25)
@given(fields=FIELDS)
def test_a_config_raises_or_comes_back_from_every_file(fields, tmp_path):
    try:
        config = NeuronALConfig(**fields)
    except (ValueError, TypeError) as error:
        assert len(str(error).split()) > 3, f"a raw error: {error!r}"
        return
    config.to_json_file(tmp_path / "config.json")
    assert NeuronALConfig.from_dict(config.to_dict()) == config
    assert NeuronALConfig.from_json_file(tmp_path / "config.json") == config
    assert config.methods == config.methods


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A pruned checkpoint, and what its config holds."""
    folder = tmp_path_factory.mktemp("pruned") / "model"
    save_pruned(folder)
    return folder, json.loads((folder / "config.json").read_text())


def changed(data, config):
    """The config with anything at any place of what this package wrote."""
    config = json.loads(json.dumps(config))
    node, key = config, "sparsity_config"
    while isinstance(node[key], (dict, list)) and node[key] and data.draw(st.booleans()):
        node = node[key]
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
    node[key] = data.draw(ANYTHING)
    return config


@examples(25)
@given(data=st.data())
def test_any_checkpoint_is_read_or_raises_a_clear_error(checkpoint, data, tmp_path):
    folder, config = checkpoint
    (folder / "config.json").write_text(json.dumps(changed(data, config)))
    output = tmp_path / "converted"
    for use in (inspect_checkpoint, lambda directory: convert_checkpoint(directory, "packed", output)):
        try:
            use(folder)
        except (ValueError, OSError) as error:
            assert len(str(error).split()) > 3, f"a raw error: {error!r}"
        shutil.rmtree(output, ignore_errors=True)


@examples(25)
@given(data=st.data())
def test_training_keeps_zeros_or_raises_whatever_a_config_says(checkpoint, data):
    model = make_model("llama")
    model.config.sparsity_config = changed(data, checkpoint[1])["sparsity_config"]
    before = state(model)
    try:
        with keep_sparsity(model):
            pass
    except (ValueError, TypeError) as error:
        assert len(str(error).split()) > 3, f"a raw error: {error!r}"
    assert same_state(model, before)


METHODS = {
    "neuronal": {"saliency": "wanda", "topup_args": {"block_lambdas": [0.1, 0.2], "row_lambdas": [0, 0.1]}},
    "search": {"saliency": "alps", "topup": "search", "topup_args": {"budget": 12}, "num_samples": 8},
    "owl": {"saliency": "sparsegpt", "topup": "owl"},
}


def prune(method, work_dir=None):
    fields = {"num_samples": 6, "num_alignment_samples": 2, "seq_length": 16, "dataset": None, **METHODS[method]}
    model, config = make_model("llama"), NeuronALConfig(0.6, **fields)
    ids = torch.randint(0, 64, (config.num_samples, 16), generator=torch.Generator().manual_seed(1))
    return NeuronALPruner(config).prune(model, ids, work_dir)


class Interrupted(Exception):
    pass


@pytest.fixture(scope="module")
def undisturbed():
    """For every method the weights that a pruning run leads to, and how often it runs a block."""
    found = {}
    for method in METHODS:
        with pytest.MonkeyPatch.context() as patch:
            count = interrupt_at(patch, None)
            found[method] = prune(method).state_dict(), count
    return found


def interrupt_at(patch, number):
    """Has a run of a block fail, the one of a number; returns the list that grows by every run."""
    runs, replay = [], BlockRunner.replay

    def counted(self, *args, **kwargs):
        runs.append(1)
        if len(runs) == number:
            raise Interrupted
        return replay(self, *args, **kwargs)

    patch.setattr(BlockRunner, "replay", counted)
    return runs


@examples(2)
@given(data=st.data())
@pytest.mark.parametrize("method", METHODS)
def test_wherever_a_prune_is_interrupted_and_whatever_file_is_cut_short_it_ends_the_same(
    method, undisturbed, data, tmp_path
):
    """A file that is cut short is not read, or raises an error that says to delete the directory."""
    expected, runs = undisturbed[method]
    work_dir = tmp_path / "work"
    shutil.rmtree(work_dir, ignore_errors=True)
    for _ in range(data.draw(st.integers(1, 2))):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, data.draw(st.integers(1, len(runs))))
            with suppress(Interrupted):
                prune(method, work_dir)
        records = sorted(path for path in work_dir.glob("*.safetensors") if path.stat().st_size)
        if records and data.draw(st.booleans()):
            path = data.draw(st.sampled_from(records))
            content = path.read_bytes()
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            try:
                assert same_state(prune(method, work_dir), expected)
            except ValueError as error:
                assert f"is damaged: delete {work_dir} to start again" in str(error)
                shutil.rmtree(work_dir)
    assert same_state(prune(method, work_dir), expected)
