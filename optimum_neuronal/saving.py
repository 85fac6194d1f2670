"""Saves a pruned model whole or not at all, with its tokenizer, its report and a model card; publishes it on the Hub."""

import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import transformers
from huggingface_hub import HfApi, ModelCard, ModelCardData
from packaging.version import Version
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .report import PruningReport, format_table


CARD = """---
{metadata}
---

# {title}

{sparsity:.1%} of the weights of this model's linear projections are zero. It was pruned without retraining by
`optimum_neuronal` (saliency: {saliency}, top-up: {topup}) and loads like any other model:

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}")
```

The weights are stored dense, zeros included. `config.json` holds how it was pruned (`sparsity_config`), and
`neuronal_report.json` every decision with its score.

{table}
"""


# A shard of an offloaded model is held in memory while it is written: at most a block, of which pruning holds several, or
# this many bytes.
OFFLOADED_SHARD = 64 * 10**6


def check_directory(directory: str | Path) -> Path:
    """Raises before long work what would keep a model from being saved in `directory`; creates nothing.

    Raises:
        `NotADirectoryError`: the path, or one of its parents, is a file.
        `PermissionError`: the directory, or the one it would be made in, cannot be written.
    """
    path = Path(directory).absolute()
    existing = _existing(path)
    if not existing.is_dir():
        raise NotADirectoryError(f"Cannot save to {directory}: {existing} is a file. Choose another directory.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"Cannot save to {directory}: no permission to write in {existing}.")
    return path


def _existing(path: Path) -> Path:
    """The path, or the nearest of its parents that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Saves model, tokenizer, report and model card. A failure leaves the directory as it was.

    Everything is written beside the directory first. A new directory then appears whole; in one that exists, the
    files are replaced one by one, and weight files that are not part of the new model are removed.

    Args:
        model (`PreTrainedModel`): the pruned model; saved as ordinary safetensors.
        directory (`str` or `Path`): where to; created if missing.
        report ([`PruningReport`]): of the prune.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): saved along.

    Raises:
        `OSError`: the directory is a file or cannot be written, or the disk is too full.
    """
    check_saveable(model)
    path = check_directory(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_space(model, path)
    staging = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        staging.mkdir()
        _write(model, staging, report, tokenizer, title=path.name)
        if path.exists():
            _replace_files(staging, path)
        else:
            staging.rename(path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"Saving to {path} failed, and its files are as they were: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload pruned model",
) -> str:
    """Uploads to the Hub what [`save_pruned`] saves, in one commit. Returns the commit's URL.

    Args:
        model, report, tokenizer: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        private, token, revision, commit_message: as for `HfApi.create_repo` and `HfApi.upload_folder`.
    """
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        check_space(model, folder)
        _write(model, Path(folder), report, tokenizer, title=repo_id)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
        )
    return commit.commit_url


def _write(
    model: PreTrainedModel,
    folder: Path,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None,
    title: str,
) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        with _known_as_offloaded(model):
            model.save_pretrained(folder, max_shard_size=max(OFFLOADED_SHARD, _largest_block(model)))
    else:
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    report.save(folder)
    (folder / "README.md").write_text(_card(model, report, title), encoding="utf-8")


@contextmanager
def _known_as_offloaded(model: PreTrainedModel) -> Iterator[None]:
    """`save_pretrained` reads offloaded weights only if the model's device map names two places, one of them the disk.

    Early releases demand two, and accelerate's `cpu_offload` sets no map.
    """
    before = model.__dict__.get("hf_device_map")
    model.hf_device_map = {"weights": "disk", "all else": "cpu"}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Attempting to save a model with offloaded modules"
            )  # hence small shards
            yield
    finally:
        if before is None:
            del model.hf_device_map
        else:
            model.hf_device_map = before


def _largest_block(model: PreTrainedModel) -> int:
    """Bytes of the largest module in any list of modules: a decoder block."""
    blocks = [block for modules in model.modules() if isinstance(modules, nn.ModuleList) for block in modules]
    return max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks)


def _card(model: PreTrainedModel, report: PruningReport, title: str) -> str:
    origin = model.config._name_or_path
    on_hub = origin and origin.count("/") <= 1 and not Path(origin).exists()
    metadata = ModelCardData(
        base_model=origin if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["sparse", "pruning", report.config["saliency"], report.config["topup"]],
    )
    rows = [[name, f"{sparsity:.2%}"] for name, sparsity in report.blocks.items()]
    table = "```\n" + format_table(["block", "sparsity"], rows) + "\n```"
    methods = {name: report.config[name] for name in ("saliency", "topup")}
    card = CARD.format(
        metadata=metadata.to_yaml(), title=title, sparsity=report.achieved_sparsity, table=table, **methods
    )
    return str(ModelCard(card))


def check_saveable(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model on disk that the installed transformers cannot save."""
    offloaded = any(parameter.is_meta for parameter in model.parameters())
    experts = any(parameter.ndim == 3 and name.endswith("_proj") for name, parameter in model.named_parameters())
    if offloaded and experts and Version(transformers.__version__) < Version("5.17"):
        raise ValueError(
            f"transformers {transformers.__version__} cannot save a mixture of experts whose weights are offloaded: install "
            "5.17 or later, or load the model into memory."
        )


def check_space(model: PreTrainedModel, directory: str | Path) -> None:
    """Raises `OSError` if the disk of a directory, which may not exist yet, has no room for the model's weights."""
    path = check_directory(directory)
    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = shutil.disk_usage(_existing(path)).free
    if free < needed:
        raise OSError(
            f"Saving to {path} needs {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free: free some space or choose "
            "another disk."
        )


def _replace_files(staging: Path, path: Path) -> None:
    new = {file.name for file in staging.iterdir()}
    for file in sorted(staging.iterdir()):
        os.replace(file, path / file.name)
    for pattern in ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"):
        for file in path.glob(pattern):
            if file.name not in new:
                file.unlink()
