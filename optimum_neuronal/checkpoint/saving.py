"""Saves models dense or packed, whole or not at all, and publishes pruned ones on the Hub."""

import copy
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.utils.hub import convert_file_size_to_int

from ..common.notes import get_logger
from ..common.validation import check_choice, check_embedding_bits
from ..compat import hf_private
from ..compat.peft import all_adapter_layers
from ..files.atomic import replaced_directory
from ..files.directories import check_writable, is_same
from ..packed.packed_module import describe_weight, packed_modules
from ..packed.packed_weight import DTYPES
from ..packed.replacing import keeps_transposed, packable_paths
from ..packed.sparsify import DenseSaving, pack_weight
from ..report import PruningReport
from .card import make_card, may_write_card
from .hub import explained
from .names import (
    ADAPTER_CONFIG,
    CONFIG,
    DENSE_INDEX,
    FORMATS,
    MODEL_CARD,
    SUFFIX,
    WEIGHT_FILES,
    belongs_to_model,
    belongs_to_model_or_tokenizer,
)
from .packed_files import QUANTIZATION_CONFIG, read_json, write_json, write_packed


logger = get_logger(__name__)

SHARD_SIZE = "50GB"  # as in transformers
OFFLOADED_SHARD = 10**9  # bytes of an offloaded model that are in memory together
# A processor's files. Its tokenizer is saved by itself.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json",
    "chat_template.json",
)  # fmt: skip


def save_pretrained(
    model: PreTrainedModel,
    save_directory: str | Path,
    format: str = "dense",
    max_shard_size: int | str = SHARD_SIZE,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Save a model dense, as transformers does, or packed. A save that fails leaves the directory as it was.

    ```python
    model = AutoModelForCausalLM.from_pretrained("llama-70")
    save_pretrained(model, "llama-70-packed", format="packed")
    ```

    Args:
        model (`PreTrainedModel`): a sparse model, in memory or offloaded; from `torch.compile`, the model inside is saved.
        save_directory (`str` or `Path`): created if missing; weights of another save are removed from it.
        format (`str`):
            `"dense"`: ordinary safetensors with zeros. `"packed"`: bitmasks and nonzero values, or codes; all packed
            weights are in memory while they are written.
        max_shard_size (`int` or `str`): bytes of a file, or text such as `"500MB"`.
        dtype (`torch.dtype`, *optional*): of the files; the model itself keeps its own. None: the model's.

    Raises:
        `TypeError`: this is not a transformers model, or not a floating-point dtype.
        `ValueError`: the format is unknown or has no such dtype, or the model has adapters.
        `OSError`: the directory cannot be written, or the disk is full.
    """
    check_saveable(model, format, dtype=dtype)
    with replaced_checkpoint(check_writable(save_directory, "save to")) as staging:
        write_model(model, staging, format, max_shard_size, dtype)


@contextmanager
def replaced_checkpoint(path: Path, belongs: Callable[[str], bool] = belongs_to_model) -> Iterator[Path]:
    """Yield the temporary folder of [`replaced_directory`], and raise what fails there as one `OSError`."""
    if (path / ADAPTER_CONFIG).exists():
        logger.warning(
            f"{path} holds an adapter, which transformers will load with the model: remove {ADAPTER_CONFIG} if it is merged."
        )
    try:
        with replaced_directory(path, belongs, last=CONFIG) as staging:
            yield staging
    except FileExistsError:  # its message says what is in the way
        raise
    except (OSError, SafetensorError) as error:
        raise OSError(f"Saving to {path} failed, and its files are unchanged: {error}") from error


def write_model(
    model: PreTrainedModel,
    folder: Path,
    format: str,
    max_shard_size: int | str = SHARD_SIZE,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's configs and weights into an empty folder."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected a PreTrainedModel, got a {type(model).__name__}. Merge adapters before you save.")
    if next(all_adapter_layers(model), None) is not None:
        raise ValueError(
            "The model carries adapters: merge them first, with PEFT's merge_and_unload(), or save them alone."
        )
    dtype = None if dtype == model.dtype else dtype  # parameters that are kept in another dtype stay as they are
    if format == "packed":
        return _write_packed(model, folder, max_shard_size, dtype)
    if next(packed_modules(model), None) is not None and getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = DenseSaving(None)  # only a part of the model was given to `sparsify`
    if any(parameter.is_meta for parameter in model.parameters()):
        size = min(convert_file_size_to_int(max_shard_size), OFFLOADED_SHARD)
        with hf_private.known_as_offloaded(model):
            model.save_pretrained(folder, max_shard_size=size)
    else:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if dtype is not None:
        _convert_files(model, folder, dtype)


def _convert_files(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Convert a dense checkpoint to another dtype, one file after the other. transformers' `save_pretrained` cannot."""
    total, convert = 0, _converter(model, dtype)
    for path in folder.glob(f"*{SUFFIX}"):
        tensors = {name: convert(name, tensor) for name, tensor in load_file(path).items()}
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, converted := path.with_suffix(".converted"), metadata={"format": "pt"})
        converted.replace(path)
    if (index := folder / DENSE_INDEX).exists():
        found = read_json(index)
        write_json(index, {**found, "metadata": {**found["metadata"], "total_size": total}})
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), "dtype": str(dtype).removeprefix("torch.")})


def _converter(model: PreTrainedModel, dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return a function of a parameter's name and value that converts it, unless the model keeps it in float32."""
    if dtype is None:
        return lambda name, tensor: tensor
    in_float32 = hf_private.names_in_float32(model, dtype)
    return lambda name, tensor: (
        tensor.to(dtype) if tensor.is_floating_point() and not in_float32.search(name) else tensor
    )


def _write_packed(
    model: PreTrainedModel, folder: Path, max_shard_size: int | str, dtype: torch.dtype | None = None
) -> None:
    write_packed(folder, *_packed_state(model, dtype), max_shard_size)
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], dtype or model.dtype
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    write_json(folder / CONFIG, {**read_json(folder / CONFIG), "quantization_config": QUANTIZATION_CONFIG})
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _packed_state(
    model: PreTrainedModel, dtype: torch.dtype | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state dict of the model that [`sparsify`] would make, and what describes its packed weights."""
    convert = _converter(model, dtype)

    def load(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return convert(name, load_offloaded_parameter(model, name) if tensor.is_meta else tensor)

    state = hf_private.untied_state(model)
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    weights = {
        name: describe_weight(m.dense_shape, dtype or m.dtype, m.transposed) for name, m in packed_modules(model)
    }
    for name, module in model.named_modules():
        keys = {path: path if path != name else f"{path}.weight" for path in packable_paths(module, name)}
        if not all(key in state and key not in tied and state[key].dtype in DTYPES for key in keys.values()):
            continue
        transposed = {path: keeps_transposed(model, path) for path in keys}
        found: dict[str, Any] = {
            path: pack_weight(load(key, state[key]), transposed[path]) for path, key in keys.items()
        }
        if None not in found.values():  # all weights of an experts module, or none
            for path, matrix in found.items():
                weight = state.pop(keys[path])
                weights[path] = describe_weight(weight.shape, matrix.dtype, transposed[path])
                state |= {f"{path}.{part}": tensor for part, tensor in matrix.stored().items()}
    return {name: load(name, tensor) for name, tensor in sorted(state.items())}, weights


def save_pruned(
    model: PreTrainedModel,
    directory: str | Path,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
    format: str | None = None,
    title: str | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    dtype: torch.dtype | None = None,
) -> None:
    """Save model, tokenizer, report and model card. A save that fails leaves the directory as it was.

    A process that is killed leaves the old checkpoint, the new one or, while files are moved, no config.json. Other files
    stay, and so does a README.md of your own. `title`: of the card; None: the directory's name.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    format = check_saveable(model, format, report.config.get("embedding_bits"), dtype)
    path = check_writable(directory, "save to")
    title, with_card = title or path.name, may_write_card(path)
    belongs = belongs_to_model if tokenizer is None else belongs_to_model_or_tokenizer
    with replaced_checkpoint(path, belongs) as staging:
        write_model(model, staging, format, max_shard_size, dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        copy_processor(model, staging)
        if with_card:
            (staging / MODEL_CARD).write_text(
                make_card(model, report, title, format, tokenizer is not None, dtype), encoding="utf-8"
            )
        else:
            logger.warning(f"{MODEL_CARD} of {title} was not written by optimum_neuronal, so it stays as it is.")
        report.save(staging)


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the processor's files of the checkpoint that a multimodal model was loaded from, unless they are there."""
    config = model.config
    if config.get_text_config(decoder=True) is config or not config.name_or_path:
        return
    for name in PROCESSOR_FILES:
        try:
            path = hf_private.find_file(config, name)
            if path is not None and not (folder / name).exists():
                shutil.copyfile(path, folder / name)
        except (OSError, ValueError) as error:
            logger.warning(f"{name} could not be copied from {config.name_or_path!r}: {error}")


def push_pruned(
    model: PreTrainedModel,
    repo_id: str,
    report: PruningReport,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload pruned model",
) -> str:
    """Upload the files of [`save_pruned`] to the Hub in one commit, which deletes the weights of an earlier push.

    Args:
        model, report, tokenizer: as for [`save_pruned`].
        repo_id (`str`): `"me/llama-70"`; created if missing.
        format (`str`, *optional*): `"dense"` or `"packed"`. None: packed if the model computes with packed weights.
        dtype (`torch.dtype`, *optional*): of the files. None: the model's.
        private (`bool`, *optional*): True to create a private repository. None: your account's default.
        token (`str`, *optional*): with permission to write. None: the one of `hf auth login`, or HF_TOKEN.
        revision (`str`, *optional*): branch to push to, created if missing. None: main.
        commit_message (`str`): of the commit.

    Returns:
        `str`: the commit's URL.

    Raises:
        `PermissionError`: there is no token, or it may not write there.
        `OSError`: the temporary disk is full, the Hub cannot be reached, or the upload failed. The repository is unchanged.
    """
    check_saveable(model, format, report.config.get("embedding_bits"), dtype)
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, explained(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with suppress(EntryNotFoundError):  # a README.md of the user's own stays
            api.hf_hub_download(repo_id, MODEL_CARD, revision=revision, local_dir=folder)
        save_pruned(model, folder, report, tokenizer, format, title=repo_id, dtype=dtype)
        try:
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
                delete_patterns=list(WEIGHT_FILES),  # except files that are uploaded
            )
        except RuntimeError as error:  # a file could not be uploaded
            raise OSError(
                f"The upload to {repo_id!r} failed: {error} Push again; sent files are not sent twice."
            ) from error
    return commit.commit_url


def check_saveable(
    model: PreTrainedModel, format: str | None, embedding_bits: int | None = None, dtype: torch.dtype | None = None
) -> str:
    """Return the checked format to save a model in, by default packed if it computes with packed weights."""
    if format is None:
        format = "packed" if next(packed_modules(model), None) else "dense"
    check_choice("format", format, FORMATS)
    check_embedding_bits(embedding_bits, format)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"The dtype to save in is {dtype!r}: expected a floating-point one, such as torch.bfloat16.")
    if format == "packed" and dtype not in (None, *DTYPES):
        raise ValueError(f"The packed format has no {dtype}: expected one of {', '.join(map(str, DTYPES))}.")
    return format


def check_output(directory: str | Path, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """Return the absolute path of a directory that a command may write a checkpoint to; never that of the dense `source`."""
    path = check_writable(directory, "save to")
    check_other_directory(source, path)
    if not overwrite and path.is_dir() and any(path.iterdir()) and not _is_pruned(path):
        raise FileExistsError(
            f"{directory} is not empty, and does not hold a pruned model. Choose another directory, or pass --overwrite "
            "to replace the model in it. Other files stay."
        )
    return path


def check_other_directory(source: str | Path | None, output: str | Path) -> None:
    """Raise `FileExistsError` if a model would be saved over the files that it was read from."""
    if source and os.path.isdir(source) and is_same(source, output):
        raise FileExistsError(f"The pruned model would replace the model in {output}. Choose another directory.")


def _is_pruned(directory: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(read_json(directory / CONFIG).get("sparsity_config"))
    return False
