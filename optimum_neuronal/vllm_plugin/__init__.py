"""vLLM computes with packed weights: of packed checkpoints, and of dense ones with zeros, packed as they arrive.

vLLM finds [`registration.register`] by the entry point `vllm.general_plugins`; nothing else imports this package, and only
`quantization` and `loader` import vLLM.
"""
