"""Makes `import optimum_neuronal` enough for transformers to know this package's quantizer, without importing transformers.

`optimum-cli` imports this package at every start, and transformers takes seconds. So the quantizer is registered when
transformers imports its list of quantizers, or at once if it has done so.
"""

import importlib
import importlib.util
import sys


QUANTIZERS = "transformers.quantizers.auto"


def register() -> None:
    """Registers the quantizer now or later; calling it again changes nothing."""
    if QUANTIZERS in sys.modules:
        importlib.import_module(".hf_quantizer", __package__)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Sees the import of one module, finds it as if it were not there itself, and is gone."""

    def find_spec(self, name, path=None, target=None):
        if name != QUANTIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Loads a module by its own loader, then registers."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
