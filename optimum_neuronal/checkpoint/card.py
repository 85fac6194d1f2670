"""Renders the model card of a pruned model from its report."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..common.connection import TIMEOUT
from ..common.display import escaped, fold_rows, format_markdown
from ..common.notes import get_logger
from ..data.known_datasets import FILE_SUFFIXES
from ..model.auto_classes import PIPELINE_TAGS, loading_class, loading_code
from ..model.sparsity import read_sparsity_config
from ..report import REPORT_NAME, PruningReport
from ..saliency import SALIENCIES
from ..topup import TOPUPS
from .names import CHAT_TEMPLATE, CONFIG, MODEL_CARD, TOKENIZER_CONFIG
from .packed_files import read_json
from .writing import SaveOptions


logger = get_logger(__name__)

TEMPLATE = Path(__file__).with_name("card_template.md")
DENSE_MODEL, TEXT = "path/to/the-dense-model", "path/to/text.txt"  # what the reader has to fill in
TAGS = ("sparse", "pruned", "optimum_neuronal")  # what people search for
INHERITED = ("license", "license_name", "license_link", "language", "datasets")  # metadata of the dense model's card


def write_card(folder: Path, model: PreTrainedModel, report: PruningReport, title: str, options: SaveOptions) -> None:
    """Write the card of a pruned model into the folder that it is saved in, with its tokenizer."""
    with_tokenizer, config = any(folder.glob("tokenizer*")), folder / TOKENIZER_CONFIG
    chats = (folder / CHAT_TEMPLATE).exists() or bool(config.exists() and read_json(config).get("chat_template"))
    try:
        card = make_card(model, report, title, options, with_tokenizer, chats)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # of a report from somewhere else
        logger.warning(f"{REPORT_NAME} is damaged ({error!r}), so there is no model card.")
        return
    (folder / MODEL_CARD).write_text(card, encoding="utf-8")


def make_card(
    model: PreTrainedModel,
    report: PruningReport,
    title: str,
    options: SaveOptions,
    with_tokenizer: bool = True,
    chats: bool = False,
) -> str:
    """Return the card of a pruned model.

    The title is a repository, `owner/name`, or the name of a directory, whose place the reader fills in. Without a tokenizer,
    the example loads the dense model's. If the model `chats`, it has a chat template.
    """
    title, loader, methods = escaped(title), loading_class(model), [*filter(None, _methods(report).values())]
    place, folder = title if "/" in title else f"path/to/{title}", title.rpartition("/")[2]
    base = (read_sparsity_config(model.config) or {}).get("base_model")
    tokenizer = (place if with_tokenizer else base or DENSE_MODEL) if model.can_generate() else None
    blocks = fold_rows([f"`{block}`", f"{value:.2%}"] for block, value in report.blocks.items())
    outputs = [f"{folder}-step-{number}" for number in range(1, 1 + len(report.training))] + [folder]
    commands = [_prune_command(model, report, base, options)]
    commands += [_tuning_command(run, base, model) for run, model in zip(report.training, outputs)]
    written = [
        [*command, "--format", str(options.format), "--output", name] for command, name in zip(commands, outputs)
    ]
    answers = [*filter(None, [report.answers, *(run["answers"].get("after") for run in report.training)])]
    examples = answers[-1]["examples"] if answers else []
    said = [[escaped(" ".join(text.split())) for text in one.values()] for one in examples]
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINE_TAGS.get(loader),
        tags=list(TAGS),
        # The Hub has no relation for a pruned model, and shows it as a fine-tuned one.
        **({"base_model": base, **_inherited(base)} if base else {}),
    )
    card = ModelCard.from_template(
        metadata,
        template_str=TEMPLATE.read_text(encoding="utf-8"),
        title=title,
        base=base,
        report=report,
        format=options.format,
        loader=loader,
        call=loading_code(model, place),
        part=" text decoder" if model.config.get_text_config(decoder=True) is not model.config else "",
        chats=chats,
        tokenizer=tokenizer and json.dumps(tokenizer, ensure_ascii=False),
        place=shlex.quote(place),
        local=shlex.quote(folder),
        blocks=format_markdown(["block", "sparsity"], blocks),
        table=format_markdown(["", "pruned model"], [*report.rows()]),
        examples=format_markdown([*examples[0]], said) if said else None,
        commands=[*map(shlex.join, written)],
        summary=" ".join(method.summary for method in reversed(methods) if method.summary),
        papers=[method.paper for method in methods if method.paper],
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
    )
    return str(card)


def _methods(report: PruningReport) -> dict[str, Any]:
    """Return the classes of top-up and saliency by name; None for one that is not registered in this process."""
    classes = {}
    for kind, registry in (("topup", TOPUPS), ("saliency", SALIENCIES)):
        name, chosen = report.config[kind], report.config[f"{kind}_args"].get("variant")
        known = name in registry.names()
        classes[name] = registry.variants(name).get(chosen, registry.get(name)) if known else None
    return classes


def _prune_command(model: PreTrainedModel, report: PruningReport, base: str | None, options: SaveOptions) -> list[str]:
    """Return the command that prunes the same way, without its output."""
    source = base or (f"path/to/{report.gguf_file}" if report.gguf_file else DENSE_MODEL)
    saved, text = str(options.dtype or model.dtype).removeprefix("torch."), report.config["dataset"] or TEXT
    command = ["optimum-cli", "neuronal", "prune", "--model", source, "--config", CONFIG]
    command += ["--dataset", *_places([text] if isinstance(text, str) else text)] if report.calibration else []
    command += [word for module in _own_modules(report) for word in ("--import", module)]
    command += ["--trust-remote-code"] if model.is_remote_code() else []
    return [*command, "--save-dtype", saved, "--dtype", report.dtype or saved]


def _own_modules(report: PruningReport) -> list[str]:
    """Return the modules of methods that this package does not have, with a placeholder for one that is not known."""
    modules = {name: method.__module__ if method else "__main__" for name, method in _methods(report).items()}
    named = [f"the_module_of_{name}" if place == "__main__" else place for name, place in modules.items()]
    return [*dict.fromkeys(place for place in named if not place.startswith("optimum_neuronal."))]


def _tuning_command(run: Mapping[str, Any], base: str | None, model: str) -> list[str]:
    """Return the command that repeats a fine-tuning run of a model, without its output."""
    config = {**run["config"], "steps": run["steps"], "dataset": _places(run["config"]["dataset"] or [TEXT])}
    command = ["optimum-cli", "neuronal", "finetune", "--model", model]
    if teacher := run["teacher"]:
        command += ["--teacher", teacher if teacher == base or "/" in teacher else f"path/to/{teacher}"]
    for name, value in config.items():
        if value is not None and name not in ("tokens", "minutes"):
            flag = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            command += [flag] if isinstance(value, bool) else [flag, *map(str, values)]
    return command


def _places(names: Sequence[str]) -> list[str]:
    """Return datasets as the reader of a card names them: files are somewhere."""
    is_file = (name.partition(":")[0].lower().endswith(FILE_SUFFIXES) and "/" not in name for name in names)
    return [f"path/to/{name}" if own else name for name, own in zip(names, is_file)]


def _inherited(base: str) -> dict[str, Any]:
    """Return the metadata of the dense model's card that hold for the pruned model too; {} without network or card."""
    try:
        card = HfApi().model_info(base, timeout=TIMEOUT).card_data
        return {key: value for key, value in (card.to_dict() if card else {}).items() if key in INHERITED and value}
    except Exception as error:  # of many kinds: no network, no repository, invalid YAML
        logger.info(f"The card of {base} could not be read for its license and language: {error}")
        return {}
