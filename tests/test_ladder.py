"""A training run of benchmarks/ladder.py that is stopped or killed ends with the weights of one that was not."""

import fcntl
import importlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig


SETTINGS = {"rungs": (1, 2), "length": 16, "batch": 4, "micro": 2, "warmup": 5, "told": 100}
SHAPE = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


@pytest.fixture(scope="module")
def modules():
    """benchmarks.ladder and benchmarks.ladder_run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent.parent)
        yield [importlib.import_module(f"benchmarks.{name}") for name in ("ladder", "ladder_run")]


def prepared(state):
    """What `prepare` writes, small: windows for less than an epoch of the second rung."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(state / "model")
    (np.arange(1200, dtype="<u2") ** 2 % 31).tofile(state / "tokens.bin")
    return state


def content(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def assert_same(state, expected):
    """All that a run has: weights, moments and steps, bit by bit."""
    files = {file.name for file in expected.glob("*.safetensors")}
    assert files == {file.name for file in state.glob("*.safetensors")}
    assert files == {"main.safetensors", "rung-1.safetensors", "rung-2.safetensors"}
    for name in files:
        (tensors, said), (tensors_expected, said_expected) = content(state / name), content(expected / name)
        assert said == said_expected and tensors.keys() == tensors_expected.keys()
        assert {key.partition(".")[0] for key in tensors} == {"weight", "step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(tensors[key], tensors_expected[key]) for key in tensors)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, modules):
    """The state after a run without a stop."""
    state = prepared(tmp_path_factory.mktemp("uninterrupted"))
    assert modules[0].train(state, 2, modules[1].Plan(**SETTINGS))
    return state


def test_rungs(expected, modules, capsys):
    run = modules[1].Training(expected, modules[1].Plan(**SETTINGS))
    ends = [run.last_step(rung) for rung in (1, 2)]
    assert ends[1] * 64 >= 2 * run.model.num_parameters() > (ends[1] - 1) * 64
    steps = {name: int(content(expected / f"{name}.safetensors")[1]["step"]) for name in ("main", "rung-1", "rung-2")}
    assert steps == {"main": ends[1] - ends[1] // 10, "rung-1": ends[0], "rung-2": ends[1]}
    assert ends[1] > len(run.windows) // 4, "more than an epoch"


def test_stopped_every_few_steps(tmp_path, modules, expected):
    """The first start makes no step, and each after it five at most: stops come in the main run and in the branches."""
    state, starts, finished = prepared(tmp_path), 0, False
    while not finished:
        asked = iter(range(6 if starts else 0))
        finished = modules[0].train(
            state, 2, modules[1].Plan(**SETTINGS), lambda asked=asked: next(asked, None) is None
        )
        starts += 1
    assert starts > 4
    assert_same(state, expected)


def test_killed_while_it_writes(tmp_path, modules, expected, monkeypatch):
    """The fifth write of every start leaves half a file, and the next start goes on from the fourth."""
    state, starts, finished, save_file = prepared(tmp_path), 0, False, modules[1].save_file
    while not finished:
        writes = iter(range(1, 100))

        def save(tensors, path, metadata, writes=writes):
            save_file(tensors, path, metadata)
            if next(writes) == 5:
                path.write_bytes(path.read_bytes()[:1000])
                raise KeyboardInterrupt

        monkeypatch.setattr(modules[1], "save_file", save)
        try:
            finished = modules[0].train(state, 2, modules[1].Plan(**SETTINGS, minutes=0))
        except KeyboardInterrupt:
            starts += 1
    assert starts > 4
    for file in state.glob("*.new"):
        file.unlink()
    assert_same(state, expected)


def test_goes_on_elsewhere(tmp_path, modules, expected):
    """A run that starts from an exported one takes its weights and its step, and warms up once more."""
    ladder, run = modules
    plan, state = run.Plan(**SETTINGS), prepared(tmp_path)
    first = run.Training(expected, plan)
    first.load(expected / "rung-1.safetensors")
    first.model.config.training_steps = first.step
    first.model.to(torch.bfloat16).save_pretrained(state / "model")
    second = run.Training(state, plan)
    assert second.step == first.step
    assert all(torch.equal(second.parameters[name], weight.float()) for name, weight in first.parameters.items())
    rates = []
    learn = second.learn
    second.learn = lambda rate: rates.append(rate) or learn(rate)
    assert second.advance(state / "main.safetensors", 4, lambda: len(rates) == 3) is False
    assert rates == [pytest.approx(plan.rate * step / plan.warmup) for step in (1, 2, 3)]
    assert content(state / "main.safetensors")[1] == {"step": str(first.step + 3), "began": str(first.step)}
    assert ladder.train(state, 2, plan), "the rung that it began from is not made again"
    assert {file.name for file in state.glob("*.safetensors")} == {"main.safetensors", "rung-2.safetensors"}


def test_one_at_a_time(tmp_path, modules, capsys):
    with (prepared(tmp_path) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            modules[0].main(["train", "--state", str(tmp_path)])
    assert "another process trains" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.safetensors"))


def test_told_to_stop(tmp_path, modules, expected, monkeypatch):
    """A signal ends the step at hand, and the command says that the rung is not reached."""
    ladder, run = modules
    state, learn = prepared(tmp_path), run.Training.learn
    plan = run.Plan(**SETTINGS)
    monkeypatch.setattr(ladder.train, "__defaults__", (plan, *ladder.train.__defaults__[1:]))

    def told(self, rate):
        os.kill(os.getpid(), signal.SIGTERM)
        return learn(self, rate)

    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(run.Training, "learn", told)
        assert ladder.main(["train", "--state", str(state), "--until", "2"]) == 1
    assert signal.getsignal(signal.SIGTERM) is handler
    assert content(state / "main.safetensors")[1] == {"step": "1", "began": "0"}
    assert ladder.main(["train", "--state", str(state), "--until", "2"]) == 0
    assert_same(state, expected)
