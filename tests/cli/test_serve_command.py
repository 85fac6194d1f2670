import pytest

from optimum_neuronal.cli import serve_command
from optimum_neuronal.transformers_plugin import autoload, serving


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(serve_command, "find_spec", lambda name: name)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_flags_are_passed_on(run, dense, monkeypatch, installed, command):
    calls = []
    monkeypatch.setattr(serving, command, lambda *words: calls.append(words))
    run(command, dense, "--port", "8001", "--continuous-batching", "x=1")
    run(command, dense)
    assert calls == [(str(dense), "--port", "8001", "--continuous-batching", "x=1"), (str(dense),)]


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_the_missing_extra_is_named_before_a_model_is_looked_for(run, monkeypatch, command):
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None if name == "fastapi" else name)
    with pytest.raises(SystemExit) as stop:
        run(command, "me/never-looked-at")
    assert "needs fastapi: pip install 'optimum-neuronal[serve]'" in stop.value.code


def test_a_directory_that_does_not_exist(run, installed):
    with pytest.raises(SystemExit) as stop:
        run("serve", "./absent")
    assert "./absent does not exist" in stop.value.code


def test_register(run, tmp_path, monkeypatch):
    monkeypatch.setattr(autoload, "_folders", lambda: [tmp_path])
    off = "off: a program has to import optimum_neuronal itself\n"
    assert run("register", "--status") == off
    assert run("register", "--on") == run("register", "--status") == f"on: {tmp_path / autoload.FILE}\n"
    assert run("register", "--off") == off
    with pytest.raises(SystemExit):
        run("register")
