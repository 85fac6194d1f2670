"""A registry of interchangeable methods, name -> class, which finds the modules beside the base class."""

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Generic, TypeVar

from .validation import did_you_mean, make_checked


Method = TypeVar("Method")
Registered = TypeVar("Registered", bound=type)


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Split a method's text: `"owl:half_width=0.1"` -> `("owl", {"half_width": 0.1})`. Other than literals, values are text."""
    name, colon, rest = text.partition(":")
    if not colon:
        return name, {}
    with suppress(SyntaxError, ValueError, AttributeError):
        call: Any = ast.parse(f"_({rest})", mode="eval").body
        arguments = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        if arguments and None not in arguments and not call.args:
            return name, arguments
    raise ValueError(f"Invalid method {text!r}: expected NAME or NAME:KEY=VALUE,KEY=VALUE.")


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


class Registry(Generic[Method]):
    """Methods of one kind, registered by a decorator and found by name.

    All modules of `package` are imported at the first look-up, so adding a file adds a method.
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind  # for error messages: "saliency"
        self.package = package
        self._classes: dict[str, type[Method]] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Return a class decorator that registers a class as `name`. Running the same class statement again replaces it."""

        def decorate(cls: Registered) -> Registered:
            if not cls.__module__.startswith(f"{self.package}."):
                self._discover()  # a user's class cannot take the name of a built-in one
            taken = self._classes.get(name)
            if taken is not None and _place(taken) != _place(cls):
                raise ValueError(f"The {self.kind} name {name!r} is taken by {_place(taken)}: choose another.")
            cls.name = name
            self._classes[name] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._classes)

    def get(self, name: str) -> type[Method]:
        """Return the class registered as `name`, or raise `ValueError` with the known names. A hyphen may stand for `_`."""
        known = self.names()
        if not isinstance(name, str):
            raise TypeError(f"{self.kind} is {name!r}: expected one of {', '.join(known)}.")
        name = name if name in known else name.replace("-", "_")
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"Unknown {self.kind} {name!r}.{hint} Known: {', '.join(known)}.")
        return self._classes[name]

    def make(self, name: str, argument: str, values: Mapping[str, Any]) -> Method:
        """Return a method with hyper-parameters; `argument` is the caller's name of them, such as `"topup_args"`."""
        return make_checked(self.get(name), f"the {self.kind} {name!r}", argument, values)

    def _discover(self) -> None:
        if not self._discovered:
            for module in pkgutil.iter_modules(sys.modules[self.package].__path__):
                importlib.import_module(f"{self.package}.{module.name}")
            self._discovered = True


def _place(cls: type) -> str:
    """Return the module and name of a class, which stay if its class statement runs again."""
    return f"{cls.__module__}.{cls.__qualname__}"
