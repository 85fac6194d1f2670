"""The model card of a pruned model: where it comes from, how to load it, what it lost, how to make it again."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel

from ..data.documents import FILE_SUFFIXES
from ..display import escaped, format_bytes, format_markdown
from ..model.find_blocks import find_decoder
from ..model.load_model import TRUSTING, LoadingCode, loading_code
from ..model.projections import Projection
from ..report import REPORT_NAME, PruningReport
from .card_metadata import make_metadata
from .origin import hub_id
from .own_files import MARK
from .packed_size import PackedSize, packed_size


CARD = """---
{metadata}
---

{mark}

# {title}

{sparsity:.1%} of the weights of this model's linear projections are zero. It was pruned{origin} without retraining by
`optimum_neuronal` (saliency: {saliency}, top-up: {topup}).{rounded}

## Use

{loading}

## Sparsity

Asked for were {requested:.1%} of the projections' weights; `neuronal_report.json` holds every decision with its score.

{blocks}

{sizes}

{evaluation}## Limitations

{limitations}

## How it was made

{calibration}

This command makes it again, with the `neuronal_report.json` that lies beside this card:

```sh
{command}
```

So does this code:

```python
{code}
```
{fill_in}
{versions}
"""

LOADING = {
    "dense": """It loads like any other model; the zeros are stored as ordinary weights.

```python
{imports}

model = {call}
{example}```""",
    "packed": """Stored are the weights that are not zero{bits}, and where they belong{head}. `import optimum_neuronal` makes transformers
understand that, and the result is an ordinary model:

```python
import optimum_neuronal
{imports}

model = {call}
{example}```

For tools that know plain checkpoints alone, write a dense one, bit for bit the same weights:

```sh
optimum-cli neuronal convert {local} --format dense --output {dense}
```""",
}

EXAMPLE = """tokenizer = AutoTokenizer.from_pretrained({tokenizer})

inputs = tokenizer("Once upon a time", return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=50)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))
"""

LIMITATIONS = """- What the dense model cannot do, and its biases, are here as well, and pruning takes something away.
- {measured}{calibrated}
- Stored dense, it is as large and as slow as the dense model: zeros pay off with packed weights.
- Training fills the zeros, unless it is told to keep them: `SparsityCallback` of `optimum_neuronal`."""

CALIBRATED = """
- The weights were chosen to do well on text like the calibration data. Other languages, code, long texts and rare
  knowledge may have lost more."""

TEXT_LITERAL = r'"(?:[^"\\]|\\.)*"'  # so that no code of another card is passed on
DENSE_MODEL, TEXT = "path/to/the-dense-model", "path/to/text.txt"  # what the reader has to fill in


def make_card(
    model: PreTrainedModel, report: PruningReport, title: str, format: str = "dense", with_tokenizer: bool = True
) -> ModelCard:
    """The card.

    Args:
        model (`PreTrainedModel`): the pruned model; its config tells the checkpoint that it was loaded from.
        report ([`PruningReport`]): of the prune.
        title (`str`): how the model is called: its repository or its directory.
        format (`str`): `"dense"` or `"packed"`: how the weights are stored.
        with_tokenizer (`bool`): whether a tokenizer is saved with it; otherwise the dense model's is named.
    """
    base, title, code = hub_id(model), escaped(title), loading_code(model)
    tokenizer = (title if with_tokenizer else base or DENSE_MODEL) if model.can_generate() else None
    text, bits = _calibration_text(report), (report.config.get("value_bits"), report.config.get("embedding_bits"))
    card = CARD.format(
        metadata=make_metadata(model, report, title, code.pipeline_tag).to_yaml(),
        mark=MARK,
        title=title,
        sparsity=report.achieved_sparsity,
        requested=report.requested_sparsity,
        origin=f" from [{base}](https://huggingface.co/{base})" if base else "",
        saliency=report.config["saliency"],
        topup=report.config["topup"],
        rounded=_rounded(report),
        loading=_loading(title, code, format, tokenizer and _quoted(tokenizer), *bits),
        blocks=format_markdown(
            ["block", "sparsity"], [[f"`{name}`", f"{value:.2%}"] for name, value in report.blocks.items()]
        ),
        sizes=_sizes(model, report),
        evaluation=_evaluation(report),
        limitations=LIMITATIONS.format(
            measured=_measured(report), calibrated=CALIBRATED if report.calibration else ""
        ),
        calibration=_calibration(report.calibration),
        command=_command(base, title, text),
        code=_code(base, report, code, text),
        fill_in=_fill_in(base, report, text),
        versions="With " + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + ".",
    )
    return ModelCard(card)


def with_format(card: str, format: str, value_bits: int | None = None, embedding_bits: int | None = None) -> str:
    """The text of a card whose section on use is that of another format; a card of another make stays as it is."""
    title = re.search(r"^# (.+)$", card, re.M)
    before, use, rest = card.partition("\n## Use\n\n")
    old, sparsity, after = rest.partition("\n\n## Sparsity\n")
    call = re.search(rf"^model = (\w+)\.from_pretrained\(.*?({TRUSTING})?\)$", old, re.M)
    if title is None or call is None or not sparsity:
        return card
    code = LoadingCode(call[1], call[2] or "")
    tokenizer = re.search(rf"^tokenizer = AutoTokenizer\.from_pretrained\(({TEXT_LITERAL})\)$", old, re.M)
    name = tokenizer and tokenizer[1]
    return before + use + _loading(title[1], code, format, name, value_bits, embedding_bits) + sparsity + after


def _loading(
    title: str,
    code: LoadingCode,
    format: str,
    tokenizer: str | None,
    value_bits: int | None,
    embedding_bits: int | None,
) -> str:
    """The section on use; the tokenizer's place is quoted already, None if the model generates nothing."""
    local = title.rpartition("/")[2]
    names = code.loader + (", AutoTokenizer" if tokenizer else "")
    return LOADING[format].format(
        imports=f"from transformers import {names}",
        call=code.of(title),
        example=EXAMPLE.format(tokenizer=tokenizer) if tokenizer else "",
        bits="" if value_bits is None else f", {value_bits} bits each",
        head="" if embedding_bits is None else f"; of token embeddings and head all, {embedding_bits} bits each",
        local=shlex.quote(local),
        dense=shlex.quote(f"{local}-dense"),
    )


def _rounded(report: PruningReport) -> str:
    """What was rounded, and what that did to embeddings and head."""
    told = ""
    if (bits := report.config.get("value_bits")) is not None:
        told = f" The others are rounded to {bits} bits, with a scale for every row and 128 columns."
    if report.head_roundings:
        error = max(rounding["error"] for rounding in report.head_roundings.values())
        told += f" Token embeddings and head are rounded to 8 bits, with a squared error of at most {error:.4%}."
    return told


def _quoted(text: str) -> str:
    """As a literal of Python."""
    return json.dumps(text, ensure_ascii=False)


def _sizes(model: PreTrainedModel, report: PruningReport) -> str:
    """What the model takes in memory with packed weights, and with dense ones."""
    packing, footprint = getattr(model, "packing", None), model.get_memory_footprint()
    if packing is not None and packing.packed:  # it has them already
        dense, packed, whole = packing.dense_bytes, packing.packed_bytes, footprint
    else:
        found = _packed_size(model, report)
        dense, packed, whole = found.dense, found.in_memory, footprint - found.dense + found.in_memory
    return (
        f"`SparseModelForCausalLM` and `sparsify` of `optimum_neuronal` compute with packed weights: {_which(report)} take\n"
        f"{format_bytes(packed)} of memory instead of {format_bytes(dense)}, the whole model "
        f"{format_bytes(whole)} instead of {format_bytes(whole - packed + dense)}."
    )


def _which(report: PruningReport) -> str:
    return "the pruned ones" if report.config.get("embedding_bits") is None else "pruned ones, embeddings and head"


def _packed_size(model: PreTrainedModel, report: PruningReport) -> PackedSize:
    def zeros(projection: Projection) -> int:
        return round(report.projections[projection.name]["sparsity"] * projection.numel)

    decoder = find_decoder(model, report.config["targets"], report.config["ignore"])
    return packed_size(decoder, zeros, report.config.get("value_bits"), report.config.get("embedding_bits"))


def _evaluation(report: PruningReport) -> str:
    if not report.evaluation:
        return ""
    rows = [
        [dataset, *(f"{values[when]:.2f}" if when in values else "-" for when in ("dense", "pruned"))]
        for dataset, values in report.evaluation.items()
    ]
    return f"## Perplexity\n\n{format_markdown(['dataset', 'dense model', 'pruned'], rows)}\n\n"


def _measured(report: PruningReport) -> str:
    """What is known of the loss."""
    if not report.evaluation:
        return "What it lost was not measured: measure it, on what you want it for."
    return "Measured was perplexity alone, on the text named above: measure it on what you want it for."


def _calibration(calibration: Mapping[str, Any]) -> str:
    if not calibration:
        return "No calibration data were needed."
    return "Calibration: {num_samples} sequences of {seq_length} tokens of {source}, drawn with seed {seed}.".format(
        **calibration
    )


def _calibration_text(report: PruningReport) -> str | None:
    """Where the calibration data lie, for the reader to fill in; None if the config names them, or there are none."""
    if not report.calibration:
        return None
    name = (report.config["dataset"] or "").partition(":")[0]
    if not name or not report.calibration["source"].startswith(name):  # they were passed to prune()
        return TEXT
    return f"path/to/{name}" if name.lower().endswith(FILE_SUFFIXES) else None


def _command(base: str | None, title: str, text: str | None) -> str:
    """What makes the model again on the command line."""
    words = ["--model", base or DENSE_MODEL, "--config", REPORT_NAME, *(["--dataset", text] if text else [])]
    return shlex.join(["optimum-cli", "neuronal", "prune", *words, "--output", title.rpartition("/")[2]])


def _fill_in(base: str | None, report: PruningReport, text: str | None) -> str:
    """Which words of command and code are the reader's to replace."""
    places = [] if base else [f"`{DENSE_MODEL}` is where you have the dense model"]
    if text:
        places.append(f"`{text}` is your file of the calibration data, {report.calibration['source']}")
    return f"\nFill in: {'; '.join(places)}.\n" if places else ""


def _code(base: str | None, report: PruningReport, code: LoadingCode, text: str | None) -> str:
    """What makes the model again: the fields of the config that matter or differ from the defaults."""
    from ..config import NeuronALConfig  # with all methods: what only loads and saves does without

    config = report.config if text is None else {**report.config, "dataset": text}
    default = NeuronALConfig(config["sparsity"], topup=config["topup"], saliency=config["saliency"]).to_dict()
    always = ("sparsity", "saliency", "topup", *(("dataset", "num_samples", "seed") if report.calibration else ()))
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
