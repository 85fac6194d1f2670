"""vLLM computes with packed weights: of packed checkpoints, and of dense ones with zeros, packed as they arrive.

vLLM finds it by the entry point `vllm.general_plugins`. Only `quantization` and `loader` import vLLM.
"""
