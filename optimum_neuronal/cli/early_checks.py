"""Checks of arguments that need nothing heavy, so that a mistyped name is an error within a second or two."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..checkpoint.names import DENSE_FILE, WEIGHT_SUFFIXES
from ..common.registry import parse_method
from ..common.validation import did_you_mean
from ..data.documents import find_dataset
from ..files.directories import check_writable
from .flags import methods


FIGURES = (".png", ".svg")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise for names of methods, files, folders and models, among the arguments of a command, that cannot be right.

    Raises:
        `ValueError`: an unknown method or task, a malformed name of a dataset, a name of figures with an ending.
        `OSError`: a file, folder or model that does not exist, or a directory that cannot be written.
        `ImportError`: figures without matplotlib, tasks without lm-eval.
    """
    for room in ("saliency", "topup"):
        for text in _several(args, room):
            _check_method(room, text)
    for name in [*_several(args, "dataset"), *_several(args, "evaluate")]:
        find_dataset(name)
    if getattr(args, "config", None) is not None:
        if not os.path.isfile(args.config):
            raise FileNotFoundError(f"--config {args.config} is not a file: check its path.")
    if getattr(args, "include_path", None) is not None and not os.path.isdir(args.include_path):
        raise FileNotFoundError(f"--include-path {args.include_path} is not a folder of task files: check its path.")
    if getattr(args, "output", None) is not None:
        check_writable(args.output, "save to")
    if getattr(args, "plots", None):
        _check_plots(args.plots)
    if getattr(args, "model", None) is not None:
        check_model(args.model, args.revision, weights=not getattr(args, "dry_run", False))


def _several(args: argparse.Namespace, name: str) -> list[str]:
    """Return the values of an argument, of which there may be none, one or several."""
    value: Any = getattr(args, name, None)
    return [value] if isinstance(value, str) else list(value or ())


def _check_method(room: str, text: str) -> None:
    name, known = parse_method(text)[0], methods(room).split(", ")
    if name not in known and f"optimum_neuronal.{room}" not in sys.modules:  # a plug-in may have registered more
        raise ValueError(f"Unknown {room} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")


def _check_plots(plots: str | bool) -> None:
    """Raise if figures cannot be drawn, or not under this name (True: under names of their own)."""
    from ..common.figure_style import check_matplotlib

    if isinstance(plots, str):
        if not Path(plots).absolute().parent.is_dir():
            raise ValueError(f"The folder of --plots {plots} does not exist: make it first.")
        if plots.endswith(FIGURES):
            raise ValueError(f"--plots {plots}: leave the suffix out, since {' and '.join(FIGURES)} are added.")
    check_matplotlib()


def check_model(name: str, revision: str | None = None, weights: bool = True) -> None:
    """Raise `OSError` for a model that is neither a directory nor, as far as one request shows, on the Hub.

    Without this, loading asks again and again for minutes.

    Args:
        name (`str`): directory, or id on the Hub.
        revision (`str`, *optional*): branch, tag or commit on the Hub.
        weights (`bool`): True if a directory has to hold a file of weights.
    """
    from huggingface_hub import constants

    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, constants.CONFIG_NAME)):
            raise FileNotFoundError(f"There is no {constants.CONFIG_NAME} in {name}: name the directory of a model.")
        if weights and not any(file.endswith(WEIGHT_SUFFIXES) for file in os.listdir(name)):
            raise FileNotFoundError(
                f"There are no weights in {name}: expected {DENSE_FILE}, or the other files that save_pretrained writes."
            )
        return
    beside = [path.name for path in Path(name).parent.glob("*") if path.is_dir()] if Path(name).parent.is_dir() else []
    hint = did_you_mean(Path(name).name, beside)
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise FileNotFoundError(f"The directory {name} does not exist: check its path.{hint}")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        cached = try_to_load_from_cache(name, constants.CONFIG_NAME, revision=revision)
        if constants.HF_HUB_OFFLINE or isinstance(cached, str):
            return
        HfApi().model_info(name, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{name} is neither a directory here nor a model on the Hub that you may read: check the name.{hint} For a private "
            "model, log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except HfHubHTTPError:  # the Hub answered; loading explains what it refuses
        return
    except Exception as error:  # of many kinds: no network, a proxy, a timeout
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise OSError(
            f"{name} is no directory here and not in the cache, and the Hub cannot be reached ({reason}).{hint}"
        ) from error
