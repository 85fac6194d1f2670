"""Makes `import optimum_neuronal` enough for transformers to know this package's quantizer, without importing transformers.

`optimum-cli` imports this package at every start, and transformers takes seconds. So the quantizer is registered when
transformers executes its list of quantizers, or at once if it has done so.
"""

import importlib
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec


QUANTIZERS = "transformers.quantizers.auto"


def register() -> None:
    """Registers the quantizer now or later; calling it again changes nothing."""
    if QUANTIZERS in sys.modules:
        _register_now()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register_now() -> None:
    importlib.import_module(".hf_quantizer", __package__)


class _Finder:
    """Finds one module as if it were not there itself, and sees it executed; then it takes itself away.

    Being asked for the module changes nothing: whoever asks may only want to know whether there is one.
    """

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name != QUANTIZERS:
            return None
        for finder in self._others():
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def _others(self) -> list:
        """The finders that would be asked next. Those before this one have been asked, and know nothing of the module."""
        finders = list(sys.meta_path)
        return finders[finders.index(self) + 1 :] if self in finders else finders

    def take_away(self) -> None:
        """From what the import system asks; another thread may have done it."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader:
    """Loads a module by its own loader, then registers. All else that may be asked of a loader, that one answers.

    Args:
        loader: the module's own.
        finder ([`_Finder`]): no longer needed when the module has been executed and the quantizer is registered.
    """

    def __init__(self, loader, finder: _Finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name: str):
        if name == "_loader":  # of an instance that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if sys.modules.get(QUANTIZERS) is module:  # else a copy of it, which transformers does not use
            _register_now()
            self._finder.take_away()
