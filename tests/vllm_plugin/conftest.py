"""Checkpoints of the demo's model for vLLM. Tests in served/ need vLLM, which `make test-vllm` installs; others do not."""

from importlib.util import find_spec


collect_ignore = [] if find_spec("vllm") else ["served"]
