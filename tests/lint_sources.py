"""Rules for the package's sources that ruff does not have. `make check` runs this; each offence is one line of output.

- Private names of transformers, accelerate and PEFT stand in `compat/` alone.
- Names of a checkpoint's files stand in `checkpoint/names.py` alone.
- Loggers come from `system/notes.py`, so that `TRANSFORMERS_VERBOSITY` governs them.
- Progress bars are shown on terminals alone: in a file every step of one would be a line.
- `transformers_plugin/__init__.py` imports nothing, so that `import optimum_neuronal` is quick.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


PACKAGE = Path(__file__).parents[1] / "optimum_neuronal"

# Imports from transformers that are allowed outside of compat/: of the top level every class and function.
PUBLIC = {
    "transformers.utils": {"logging"},
    "transformers.utils.quantization_config": {"QuantizationConfigMixin"},
    # `transformers.quantizers` itself is not there yet when the quantizer is registered.
    "transformers.quantizers.auto": {"register_quantization_config", "register_quantizer"},
    "transformers.quantizers.base": {"HfQuantizer"},
}
MODULES = {"modeling_utils", "trainer_callback", "core_model_loading", "utils", "quantizers", "integrations", "models"}
PRIVATE = {
    "compat/hf_private.py": {
        "_no_split_modules", "_keys_to_ignore_on_save", "_name_or_path", "_hf_peft_config_loaded",
        "_weight_conversions", "hf_quantizer", "hf_device_map", "is_quantized", "transformers_weights", "_apply_gate",
        "is_concatenated", "is_transposed", "has_gate", "has_bias", "post_expert_norm", "_experts_implementation",
        "_attn_implementation", "_is_hf_initialized", "_experts_implementation_internal", "_is_expert_parallel",
        "all_tied_weights_keys", "update_attn_implementation", "update_tp_plan", "update_ep_plan",
        "convert_file_size_to_int",
    },
    "compat/serving.py": {"_load_model"},
    "compat/accelerate.py": {"_hf_hook", "_old_forward"},
    "compat/peft.py": {
        "get_base_layer", "base_layer", "get_base_model", "original_module", "parameter_name", "lora_A", "lora_B",
        "lora_variant", "lora_magnitude_vector", "get_delta_weight", "active_adapters",
    },
}  # fmt: skip
OF_TRANSFORMERS = ("compat/hf_private.py", "compat/serving.py")
COMPAT = {"hf_private", "accelerate", "peft"}  # names under which modules of compat/ are imported

FILE_NAMES = {"config.json", "generation_config.json", "README.md", "neuronal_report.json"}
FILE_SUFFIXES = (".safetensors", ".index.json")
# Files below checkpoint/, which cannot import its names.
OWN_FILE_NAMES = {"report.py": {"neuronal_report.json"}, "files/records.py": {".safetensors"}}


def lint(place: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line number and message of every offence in a module; `place` is its path in the package."""
    for module, name, line in imports(tree):
        library = module.partition(".")[0]
        if library in ("accelerate", "peft") and place != f"compat/{library}.py":
            yield line, f"{module} is imported: offer in compat/{library}.py what is needed of it"
        if library == "transformers" and place not in OF_TRANSFORMERS and not is_public(module, name):
            yield line, f"{module}.{name} is private: offer in compat/hf_private.py what is needed of it"
    for home, private in PRIVATE.items():
        for name, line in names_used(tree):
            if name in private and place != home:
                yield line, f"{name} is private: offer in {home} what is needed of it"
    for text, line in literals(tree):
        if is_file_name(text) and place != "checkpoint/names.py" and text not in OWN_FILE_NAMES.get(place, ()):
            yield line, f"{text!r} is the name of a file: import it from checkpoint/names.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "get_logger" and place != "system/notes.py":
            yield node.lineno, "the logger is not below transformers': import get_logger from system/notes.py"
        if is_bar(node) and "disable" not in {keyword.arg for keyword in node.keywords}:
            yield node.lineno, "a progress bar without disable=None is written to files, too"
    if place == "transformers_plugin/__init__.py" and [type(node) for node in tree.body] != [ast.Expr]:
        yield 1, "a docstring alone belongs here: import optimum_neuronal must need neither torch nor transformers"


def is_bar(node: ast.AST) -> bool:
    """Return True for a call that makes a progress bar."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "tqdm"


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None, int]]:
    """Yield module, name or None, and line of every absolute import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from ((node.module, alias.name, node.lineno) for alias in node.names)


def is_public(module: str, name: str | None) -> bool:
    """Return True if an import of transformers is of a documented name."""
    return name not in MODULES if module == "transformers" else name in PUBLIC.get(module, ())


def names_used(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield attributes, names of functions and classes, and texts, such as the second argument of getattr."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in COMPAT:
            yield node.attr, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno


def literals(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield texts, and the parts of f-strings, except docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value, node.lineno


def is_file_name(text: str) -> bool:
    """Return True for the name of a checkpoint's file, or the end of one; False for a sentence."""
    return text in FILE_NAMES or (text.endswith(FILE_SUFFIXES) and " " not in text)


def main() -> int:
    count = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for line, message in sorted(lint(place, ast.parse(path.read_text(encoding="utf-8")))):
            print(f"optimum_neuronal/{place}:{line}: {message}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
