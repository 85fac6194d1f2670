"""A registry of interchangeable methods and their variants, which finds the modules next to the base class."""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Generic, TypeVar, get_type_hints

from .validation import check_choice, check_field, did_you_mean


Method = TypeVar("Method")
Registered = TypeVar("Registered", bound=type)

OWN = "corrected"  # the variant that is this package's own


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """Split a method's text: `"owl:half_width=0.1"` -> `("owl", {"half_width": 0.1})`.

    Values that are not literals stay strings.
    """
    name, colon, rest = text.partition(":")
    if not colon:
        return name, {}
    with suppress(SyntaxError, ValueError, AttributeError):
        source = f"_({rest})"
        call: Any = ast.parse(source, mode="eval").body
        arguments = {keyword.arg: _literal(keyword.value, source) for keyword in call.keywords}
        if arguments and None not in arguments and not call.args:
            return name, arguments
    raise ValueError(f"Invalid method {text!r}: expected NAME or NAME:KEY=VALUE,KEY=VALUE.")


def _literal(node: ast.expr, source: str) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.get_source_segment(source, node)


def format_method(name: str, hyperparameters: Mapping[str, Any]) -> str:
    """Return the text that [`parse_method`] splits."""
    given = ",".join(f"{key}={value}" for key, value in hyperparameters.items())
    return f"{name}:{given}" if given else name


def title_of(method: Any, parts: Sequence[str] = (), usual: Mapping[str, Any] = {}) -> str:
    """Return a method's title for tables: name, variant unless it is this package's own, and hyperparameters that differ.

    `parts` describe some of them in words, and `usual` are values of fields whose defaults depend on the variant.
    """
    changed = {}
    for entry in fields(method):
        value = getattr(method, entry.name)
        if value != usual.get(entry.name, entry.default):
            changed[entry.name] = list(value) if isinstance(value, tuple) else value
    variant = [] if method.variant == OWN else [method.variant]
    return ", ".join([method.name, *variant, *parts, *(f"{key}={value}" for key, value in changed.items())])


class Registry(Generic[Method]):
    """Methods of one kind, registered by a decorator and found by name.

    All modules of `package` are imported at the first look-up, so adding a file adds a method or a variant of one.
    """

    def __init__(self, kind: str, package: str):
        self.kind = kind  # for error messages: "saliency"
        self.package = package
        self._classes: dict[tuple[str, str | None], type[Method]] = {}  # by name and variant, None for the default one
        self._discovered = False

    def register(self, name: str, variant: str | None = None) -> Callable[[Registered], Registered]:
        """Return a class decorator that registers a class as the method `name`, or as a variant of that method.

        The method's class attribute `variant` says what users call the default. Running the same class statement again
        replaces the class.
        """

        def decorate(cls: Registered) -> Registered:
            if not cls.__module__.startswith(f"{self.package}."):
                self._discover()  # a user's class cannot take the name of a built-in one
            taken = self._classes.get((name, variant))
            if taken is not None and _place(taken) != _place(cls):
                title = f"name {name!r}" if variant is None else f"variant {variant!r} of {name!r}"
                raise ValueError(f"The {self.kind} {title} is taken by {_place(taken)}: choose another.")
            cls.name = name
            if variant is not None:
                cls.variant = variant
            self._classes[name, variant] = cls
            return cls

        return decorate

    def names(self) -> list[str]:
        self._discover()
        return sorted(name for name, variant in self._classes if variant is None)

    def get(self, name: str) -> type[Method]:
        """Return the class registered as `name`, or raise `ValueError` with the known names. A hyphen may stand for `_`."""
        known = self.names()
        if isinstance(name, str) and name not in known:
            name = name.replace("-", "_")
        check_choice(self.kind, name, known)
        return self._classes[name, None]

    def variants(self, name: str) -> dict[str, type[Method]]:
        """Return the classes of a method by variant, the default one first."""
        method = self.get(name)
        return {cls.variant: cls for (known, _), cls in self._classes.items() if known == method.name}

    def make(self, name: str, argument: str, values: Mapping[str, Any]) -> Method:
        """Return a method with checked hyperparameters. If it has variants, the value `variant` chooses one of them.

        `argument` is the caller's name of the hyperparameters, such as `"topup_args"`.
        """
        method, title, values = self.get(name), f"the {self.kind} {name!r}", dict(values)
        variants = self.variants(name)
        if len(variants) > 1:
            variant = values.pop("variant", method.variant)
            check_choice("variant", variant, list(variants))
            method = variants[variant]
            title += f" (variants: {', '.join(variants)})"
        known = {entry.name: entry for entry in fields(method)}
        for key in values:
            if key not in known:
                takes, hint = ", ".join(known) or "no hyperparameters", did_you_mean(key, known)
                raise ValueError(f"{argument} has {key!r}: {title} takes {takes}.{hint}")
        hints = get_type_hints(method)  # a module may have postponed its annotations
        return method(**{key: check_field(known[key], value, hints[key]) for key, value in values.items()})

    def _discover(self) -> None:
        if not self._discovered:
            package = importlib.import_module(self.package)
            for module in pkgutil.walk_packages(package.__path__, f"{self.package}."):
                importlib.import_module(module.name)
            self._discovered = True


def _place(cls: type) -> str:
    """Return the module and name of a class, which do not change if its class statement runs again."""
    return f"{cls.__module__}.{cls.__qualname__}"
