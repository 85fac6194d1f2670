"""Registers the quantizer with transformers at `import optimum_neuronal`, without importing transformers.

`optimum-cli` imports this package at every start, and transformers takes seconds. So the quantizer is registered when
transformers executes its list of quantizers, or at once if that has happened.
"""

import importlib
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec


QUANTIZERS = "transformers.quantizers.auto"


def register() -> None:
    """Register the quantizer now or later. A second call changes nothing."""
    if QUANTIZERS in sys.modules:
        _register_now()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register_now() -> None:
    importlib.import_module(".hf_quantizer", __package__)


class _Finder:
    """A finder of one module, which it leaves to the other finders; removed when the module has been executed.

    A search for the module changes nothing: `importlib.util.find_spec` may only ask if it exists.
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
        """Return the finders behind this one: the finders before it did not find the module."""
        finders = list(sys.meta_path)
        return finders[finders.index(self) + 1 :] if self in finders else finders

    def take_away(self) -> None:
        """Remove this finder; another thread may have done it."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Loader:
    """A loader that executes a module by the module's own loader, then registers the quantizer.

    Args:
        loader: the module's own, which has all other attributes.
        finder ([`_Finder`]): removed afterwards.
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
