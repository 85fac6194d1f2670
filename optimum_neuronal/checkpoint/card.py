"""Writes the model card of a pruned model: its origin, how to load it, what it lost, how to make it again."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from jinja2 import Template
from transformers import PreTrainedModel

from ..common.display import escaped, format_bytes, format_markdown
from ..data.documents import FILE_SUFFIXES
from ..model.load_model import TRUSTING, LoadingCode, loading_code
from ..model.packed_size import PackedSize
from ..report import REPORT_NAME, PruningReport
from .card_metadata import make_metadata
from .hub import hub_id
from .own_files import MARK


CARD, USE = (Path(__file__).with_name(name) for name in ("card_template.md", "card_use_template.md"))
TEXT_LITERAL = r'"(?:[^"\\]|\\.)*"'  # so that no code of another card is passed on
DENSE_MODEL, TEXT = "path/to/the-dense-model", "path/to/text.txt"  # what the reader has to fill in


def make_card(
    model: PreTrainedModel,
    report: PruningReport,
    size: PackedSize,
    title: str,
    format: str = "dense",
    with_tokenizer: bool = True,
) -> ModelCard:
    """Return the card of a pruned model.

    Args:
        model (`PreTrainedModel`): the pruned model; its config names the checkpoint that it was loaded from.
        report ([`PruningReport`]): of the prune.
        size ([`PackedSize`]): of its pruned weights, embeddings and head.
        title (`str`): name of the model's repository or directory.
        format (`str`): `"dense"` or `"packed"`: how the weights are stored.
        with_tokenizer (`bool`): True if a tokenizer is saved with it; otherwise the dense model's is named.
    """
    config, base, title, code = report.config, hub_id(model), escaped(title), loading_code(model)
    tokenizer = (title if with_tokenizer else base or DENSE_MODEL) if model.can_generate() else None
    text, quantized = _calibration_text(report), config.get("bits_per_weight") is not None
    errors = [rounding["error"] for rounding in report.head_roundings.values()]
    calibration = "Calibration: {num_samples} sequences of {seq_length} tokens of {source}, drawn with seed {seed}."
    perplexities = [
        [dataset, *(f"{values[when]:.2f}" if when in values else "-" for when in ("dense", "pruned"))]
        for dataset, values in report.evaluation.items()
    ]
    blocks = [[f"`{name}`", f"{value:.2%}"] for name, value in report.blocks.items()]
    command = ["optimum-cli", "neuronal", "prune", "--model", base or DENSE_MODEL, "--config", REPORT_NAME]
    command += [*(["--dataset", text] if text else []), "--output", title.rpartition("/")[2]]
    places = [] if base else [f"`{DENSE_MODEL}` is where you have the dense model"]
    if text:
        places.append(f"`{text}` is your file of the calibration data, {report.calibration['source']}")
    return ModelCard.from_template(
        make_metadata(model, report, title, code.pipeline_tag),
        template_str=CARD.read_text(encoding="utf-8"),
        mark=MARK,
        title=title,
        base=base,
        achieved=f"{report.achieved_sparsity:.1%}",
        requested=f"{report.requested_sparsity:.1%}",
        saliency=config["saliency"],
        topup=config["topup"],
        bits=f"{report.bits_per_weight:.2f}" if quantized else None,
        embedding_bits=config.get("embedding_bits"),
        embedding_error=f"{max(errors):.4%}" if errors else None,
        use=_use(
            title,
            code,
            format,
            tokenizer and json.dumps(tokenizer, ensure_ascii=False),
            quantized,
            config.get("embedding_bits"),
        ),
        blocks=format_markdown(["block", "sparsity"], blocks),
        perplexities=perplexities and format_markdown(["dataset", "dense model", "pruned"], perplexities),
        rotation=report.rotation,
        calibration=report.calibration and calibration.format(**report.calibration),
        command=shlex.join(command),
        code=_code(base, report, code, text),
        fill_in="; ".join(places),
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
        **_sizes(model, report, size),
    )


def with_format(card: str, format: str, sparsity_config: Mapping[str, Any]) -> str:
    """Return the text of a card with the section on use of another format; a card without this section stays as it is."""
    title = re.search(r"^# (.+)$", card, re.M)
    before, use, rest = card.partition("\n## Use\n\n")
    quantized = sparsity_config.get("bits_per_weight") is not None
    old, sparsity, after = rest.partition("\n\n## Size\n" if quantized else "\n\n## Sparsity\n")
    call = re.search(rf"^model = (\w+)\.from_pretrained\(.*?({TRUSTING})?\)$", old, re.M)
    if title is None or call is None or not sparsity:
        return card
    code = LoadingCode(call[1], call[2] or "")
    tokenizer = re.search(rf"^tokenizer = AutoTokenizer\.from_pretrained\(({TEXT_LITERAL})\)$", old, re.M)
    name = tokenizer and tokenizer[1]
    section = _use(title[1], code, format, name, quantized, sparsity_config.get("embedding_bits"))
    return before + use + section + sparsity + after


def _use(
    title: str,
    code: LoadingCode,
    format: str,
    tokenizer: str | None,
    quantized: bool,
    embedding_bits: int | None,
) -> str:
    """Return the section on use. The tokenizer's place is a Python literal; None if the model generates nothing."""
    local = title.rpartition("/")[2]
    return Template(USE.read_text(encoding="utf-8")).render(
        format=format,
        loader=code.loader,
        call=code.of(title),
        tokenizer=tokenizer,
        quantized=quantized,
        embedding_bits=embedding_bits,
        local=shlex.quote(local),
        local_dense=shlex.quote(f"{local}-dense"),
    )


def _sizes(model: PreTrainedModel, report: PruningReport, size: PackedSize) -> dict[str, str]:
    """Return the memory that the model takes with packed weights, and with dense ones."""
    packing, footprint = getattr(model, "packing", None), model.get_memory_footprint()
    if packing is not None and packing.packed:  # it has them already
        dense, packed, whole = packing.dense_bytes, packing.packed_bytes, footprint
    else:
        dense, packed, whole = size.dense, size.in_memory, footprint - size.dense + size.in_memory
    return {
        "packed": format_bytes(packed),
        "dense": format_bytes(dense),
        "whole_packed": format_bytes(whole),
        "whole_dense": format_bytes(whole - packed + dense),
    }


def _calibration_text(report: PruningReport) -> str | None:
    """Return the place of the calibration data that the reader has to fill in; None if the config names it, or there are none."""
    if not report.calibration:
        return None
    name = (report.config["dataset"] or "").partition(":")[0]
    if not name or not report.calibration["source"].startswith(name):  # they were passed to prune()
        return TEXT
    return f"path/to/{name}" if name.lower().endswith(FILE_SUFFIXES) else None


def _code(base: str | None, report: PruningReport, code: LoadingCode, text: str | None) -> str:
    """Return the code that makes the model again, with the fields of the config that matter or differ from the defaults."""
    from ..config.neuronal_config import NeuronALConfig  # with all methods: what only loads and saves does without

    config: dict[str, Any] = report.config if text is None else {**report.config, "dataset": text}
    amount = {name: config[name] for name in ("sparsity", "bits_per_weight") if config.get(name) is not None}
    methods = {name: config[name] for name in ("saliency", "topup") if config.get(name) is not None}
    default = NeuronALConfig(**amount, **methods).to_dict()
    always = (*amount, *methods, *(("dataset", "num_samples", "seed") if report.calibration else ()))
    names = [entry.name for entry in fields(NeuronALConfig)]
    chosen = {name: config[name] for name in names if name in always or config[name] != default[name]}
    call = code.of(base or DENSE_MODEL, ', dtype="auto"')
    arguments = "".join(f"        {name}={value!r},\n" for name, value in chosen.items())
    return (
        f"from transformers import {code.loader}\n"
        "from optimum_neuronal import NeuronALConfig, NeuronALPruner\n\n"
        f"model = {call}\n"
        f"pruner = NeuronALPruner(\n    NeuronALConfig(\n{arguments}    )\n)\n"
        "pruner.prune(model)"
    )
