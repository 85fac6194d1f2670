"""The model card of a pruned model: where it comes from, how to load it, what it lost, how to make it again."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from ..decoder.finding import find_decoder
from ..decoder.projections import Projection
from ..report import PruningReport
from ..runtime.escaping import escaped
from ..runtime.quantities import format_bytes
from ..runtime.tables import format_table
from .packed_size import PackedSize, packed_size


CARD = """---
{metadata}
---

# {title}

{sparsity:.1%} of the weights of this model's linear projections are zero. It was pruned{origin} without retraining by
`optimum_neuronal` (saliency: {saliency}, top-up: {topup}).

## Use

{loading}

## Sparsity

Asked for were {requested:.1%} of the projections' weights; `neuronal_report.json` holds every decision with its score.

{blocks}

{sizes}

{evaluation}## How it was made

{calibration}

```python
{code}
```

{versions}
"""

LOADING = {
    "dense": """It loads like any other model; the zeros are stored as ordinary weights.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({quoted})
```""",
    "packed": """Stored are the weights that are not zero, and where they belong. `import optimum_neuronal` makes transformers
understand that, and the result is an ordinary model:

```python
import optimum_neuronal
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({quoted})
```

For tools that know plain checkpoints alone, write a dense one, bit for bit the same weights:

```sh
optimum-cli neuronal convert {local} --format dense --output {dense}
```""",
}


def make_card(model: PreTrainedModel, report: PruningReport, title: str, format: str = "dense") -> ModelCard:
    """The card.

    Args:
        model (`PreTrainedModel`): the pruned model; its config tells the checkpoint that it was loaded from.
        report ([`PruningReport`]): of the prune.
        title (`str`): how the model is called: its repository or its directory.
        format (`str`): `"dense"` or `"packed"`: how the weights are stored.
    """
    base, title = _base_model(model), escaped(title)
    card = CARD.format(
        metadata=_metadata(base, report).to_yaml(),
        title=title,
        sparsity=report.achieved_sparsity,
        requested=report.requested_sparsity,
        origin=f" from [{base}](https://huggingface.co/{base})" if base else "",
        saliency=report.config["saliency"],
        topup=report.config["topup"],
        loading=_loading(title, format),
        blocks=_table(["block", "sparsity"], [[name, f"{value:.2%}"] for name, value in report.blocks.items()]),
        sizes=_sizes(model, report),
        evaluation=_evaluation(report),
        calibration=_calibration(report.calibration),
        code=_code(base, report),
        versions="With " + ", ".join(f"{name} {version}" for name, version in report.versions.items()) + ".",
    )
    return ModelCard(card)


def with_format(card: str, format: str) -> str:
    """The text of a card whose section on use is that of another format; a card of another make stays as it is."""
    title = re.search(r"^# (.+)$", card, re.M)
    before, use, rest = card.partition("\n## Use\n\n")
    _, sparsity, after = rest.partition("\n\n## Sparsity\n")
    if title is None or not sparsity:
        return card
    return before + use + _loading(title[1], format) + sparsity + after


def _loading(title: str, format: str) -> str:
    local = title.rpartition("/")[2]
    return LOADING[format].format(
        quoted=json.dumps(title, ensure_ascii=False), local=shlex.quote(local), dense=shlex.quote(f"{local}-dense")
    )


def _metadata(base: str | None, report: PruningReport) -> ModelCardData:
    # The Hub knows adapter, merge, quantized and finetune, and takes a model that does not say for a finetune. Of these
    # only "quantized" means the same model made smaller, without training.
    relation = {"base_model": base, "base_model_relation": "quantized"} if base else {}
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparse", "pruning", "optimum_neuronal", report.config["saliency"], report.config["topup"]],
        **relation,
    )


def _base_model(model: PreTrainedModel) -> str | None:
    """The Hub id of the dense model, None if it came from elsewhere: no folder of this machine is published."""
    origin = model.config.name_or_path
    return origin if origin and origin.count("/") <= 1 and not Path(origin).exists() else None


def _table(header: list[str], rows: list[list[str]]) -> str:
    return f"```\n{format_table(header, rows)}\n```"


def _sizes(model: PreTrainedModel, report: PruningReport) -> str:
    """What the model takes in memory with packed weights, and with dense ones."""
    packing, footprint = getattr(model, "packing", None), model.get_memory_footprint()
    if packing is not None and packing.packed:  # it has them already
        dense, packed, whole = packing.dense_bytes, packing.packed_bytes, footprint
    else:
        found = _packed_size(model, report)
        dense, packed, whole = found.dense, found.in_memory, footprint - found.dense + found.in_memory
    return (
        f"`SparseModelForCausalLM` and `sparsify` of `optimum_neuronal` compute with packed weights: the pruned ones take\n"
        f"{format_bytes(packed)} of memory instead of {format_bytes(dense)}, the whole model "
        f"{format_bytes(whole)} instead of {format_bytes(whole - packed + dense)}."
    )


def _packed_size(model: PreTrainedModel, report: PruningReport) -> PackedSize:
    def zeros(projection: Projection) -> int:
        return round(report.projections[projection.name]["sparsity"] * projection.shape[0] * projection.shape[1])

    return packed_size(find_decoder(model, report.config["targets"], report.config["ignore"]), zeros)


def _evaluation(report: PruningReport) -> str:
    if not report.evaluation:
        return ""
    rows = [
        [dataset, *(f"{values[when]:.2f}" if when in values else "-" for when in ("dense", "pruned"))]
        for dataset, values in report.evaluation.items()
    ]
    return f"## Perplexity\n\n{_table(['dataset', 'dense model', 'pruned'], rows)}\n\n"


def _calibration(calibration: Mapping[str, Any]) -> str:
    if not calibration:
        return "No calibration data were needed."
    return "Calibration: {num_samples} sequences of {seq_length} tokens of {source}, drawn with seed {seed}.".format(
        **calibration
    )


def _code(base: str | None, report: PruningReport) -> str:
    """What makes the model again: the fields of the config that matter or differ from the defaults."""
    from ..config import NeuronALConfig  # with all methods: what only loads and saves does without

    config = report.config
    default = NeuronALConfig(config["sparsity"], topup=config["topup"], saliency=config["saliency"]).to_dict()
    always = ("sparsity", "saliency", "topup", *(("dataset", "num_samples", "seed") if report.calibration else ()))
    names = [entry.name for entry in fields(NeuronALConfig)]
    chosen = {name: config[name] for name in names if name in always or config[name] != default[name]}
    arguments = "".join(f"        {name}={value!r},\n" for name, value in chosen.items())
    return (
        "from transformers import AutoModelForCausalLM\n"
        "from optimum_neuronal import NeuronALConfig, NeuronALPruner\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{base or "the dense model"}", dtype="auto")\n'
        f"pruner = NeuronALPruner(\n    NeuronALConfig(\n{arguments}    )\n)\n"
        "pruner.prune(model)"
    )
