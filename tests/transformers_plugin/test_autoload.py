from pathlib import Path

import pytest
from packed_models import make_zeroed
from profiles import at_night

from optimum_neuronal import save_pretrained
from optimum_neuronal.transformers_plugin import autoload

from .test_registration import run


BEGIN = """
import site, sys
def waiting():
    return [finder for finder in sys.meta_path if type(finder).__name__ == "WaitsForTransformers"]
before = set(sys.modules)
site.addsitedir(sys.argv[1])  # as Python does when it starts
assert len(waiting()) == 1 and set(sys.modules) == before
"""
REGISTERED = """
import transformers
assert "optimum_neuronal" in sys.modules and not waiting()
from transformers.quantizers import auto
assert "neuronal" in auto.QUANTIZERS and "neuronal" in auto.CONFIGS
assert "torch" not in sys.modules
"""
BROKEN = """
sys.path.insert(0, sys.argv[2])
import transformers
assert "optimum_neuronal" not in sys.modules and not waiting()
"""
LOADED = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
assert type(model).__name__ == "LlamaForCausalLM"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose start-up files Python reads."""
    folder = tmp_path / "site"
    monkeypatch.setattr(autoload, "_folders", lambda: [folder])
    return folder


def test_the_package_is_imported_when_transformers_is(folder, lazy):
    autoload.switch_on()
    run(BEGIN + REGISTERED, str(folder), path=lazy)


@pytest.mark.parametrize("content", ["raise ImportError", "raise OSError('the disk was busy')", "1 +"])
def test_a_package_that_cannot_be_imported_breaks_nothing(folder, lazy, content):
    (lazy / "optimum_neuronal.py").write_text(content)
    autoload.switch_on()
    run(BEGIN + BROKEN, str(folder), str(lazy))


@at_night
def test_a_packed_checkpoint_is_loaded_by_a_process_that_imports_transformers_alone(folder, tmp_path):
    save_pretrained(make_zeroed(), tmp_path / "packed", format="packed")
    autoload.switch_on()
    run(BEGIN + LOADED, str(folder), str(tmp_path / "packed"))


def test_on_twice_and_off_twice(folder):
    assert autoload.find_files() == []
    for _ in range(2):
        autoload.switch_on()
        assert autoload.find_files() == [folder / autoload.FILE]
    for _ in range(2):
        autoload.switch_off()
        assert autoload.find_files() == [] and not list(folder.iterdir())


def test_the_folder_is_the_packages_own_then_the_environments_then_the_users(tmp_path, monkeypatch):
    """A folder that Python does not read, or that may not be written, is passed over."""
    places = {
        "package": tmp_path / "package",
        "environment": tmp_path / "environment",
        "user": tmp_path / "user" / "deep",
    }
    monkeypatch.setattr(Path, "resolve", lambda path: places["package"] / "optimum_neuronal" / "room" / path.name)
    monkeypatch.setattr(autoload.sysconfig, "get_path", lambda _: str(places["environment"]))
    monkeypatch.setattr(autoload.site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(autoload.site, "getusersitepackages", lambda: str(places["user"]))
    writable = set()
    monkeypatch.setattr(autoload, "_is_writable", writable.__contains__)
    for read, may_write, chosen in (
        (("environment", "package"), set(places.values()), "package"),
        (("environment",), set(places.values()), "environment"),
        (("environment", "package"), {places["environment"], places["user"]}, "environment"),
        (("environment", "package"), {places["user"]}, "user"),
    ):
        monkeypatch.setattr(autoload.site, "getsitepackages", lambda read=read: [str(places[name]) for name in read])
        writable.clear()
        writable.update(may_write)
        autoload.switch_on()
        assert autoload.find_files() == [places[chosen] / autoload.FILE]
        autoload.switch_off()
    writable.clear()
    with pytest.raises(PermissionError, match="may be written: use a virtual environment"):
        autoload.switch_on()
