import ast
from pathlib import Path

import optimum_neuronal
from optimum_neuronal.checkpoint import names


PACKAGE = Path(optimum_neuronal.__file__).parent
# The two that cannot import these names, being below them: what each says is its own.
OWN = {
    "report.py": {names.REPORT_NAME},
    "files/journal.py": {f".record{names.SUFFIX}"},
}
FIXED = {names.CONFIG, names.GENERATION_CONFIG, names.MODEL_CARD, names.REPORT_NAME}


def literals(tree):
    """Texts, and parts of f-strings, that are no docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def is_a_name(text):
    """Whether it is the name of a file of a checkpoint, or the end of one: no sentence."""
    return text in FIXED or (text.endswith((names.SUFFIX, ".index.json")) and " " not in text)


def test_every_name_stands_in_one_place():
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place != "checkpoint/names.py":
            found = {text for text in literals(ast.parse(path.read_text(encoding="utf-8"))) if is_a_name(text)}
            assert found == OWN.get(place, set()), f"{place}: import it from checkpoint/names.py"


def test_the_rule_sees_what_it_forbids():
    code = "f'{stem}-{number:05}.safetensors'; 'README.md'; f'{path} has no config.json'; 'tokenizer.json'"
    assert [text for text in literals(ast.parse(code)) if is_a_name(text)] == ["README.md", ".safetensors"]


def test_files_of_weights():
    ours = (
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "packed-00001-of-00001.safetensors",
        "packed-100000-of-100000.safetensors",
        "packed.safetensors.index.json",
    )
    others = ("adapter_model.safetensors", "model-of-mine.safetensors", "consolidated.safetensors", "config.json")
    assert all(map(names.is_of_weights, ours)) and not any(map(names.is_of_weights, others))


def test_names_as_transformers_and_the_format_have_them():
    assert names.shard(names.DENSE, 1, 2) == "model-00001-of-00002.safetensors"
    assert names.shard(names.PACKED, 12, 12) == "packed-00012-of-00012.safetensors"
    assert (names.DENSE_FILE, names.DENSE_INDEX) == ("model.safetensors", "model.safetensors.index.json")
    assert names.PACKED_INDEX == "packed.safetensors.index.json"
    for number in (1, 99_999):
        name = names.shard(names.PACKED, number, 99_999)
        assert names.PACKED_SHARD.fullmatch(name) and names.is_of_weights(name)
    for name in (
        "../packed-00001-of-00001.safetensors",
        "packed-1-of-1.safetensors",
        "packed-00001-of-00001xsafetensors",
    ):
        assert not names.PACKED_SHARD.fullmatch(name)
    for name, admitted in (("weights_1.safetensors", True), ("../a.safetensors", False), (".a.safetensors", False)):
        assert bool(names.LISTED_FILE.fullmatch(name)) == admitted
