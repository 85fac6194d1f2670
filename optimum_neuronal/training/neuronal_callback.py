"""Prunes a model while transformers' `Trainer` trains it, once or gradually."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedModel, TrainerState
from transformers.trainer_callback import ExportableState

from ..common.notes import get_logger
from ..common.torch_state import preserve_rng_state
from ..config.neuronal_config import NeuronALConfig
from ..data.token_windows import resolve_bos, resolve_seq_length, with_bos
from ..model.sparsity import KEY, measure_sparsity, read_sparsity_config, record_sparsity
from ..pruning.prepare import check_prune, prepare
from ..pruning.prune import make_sparsity_config, prune_model
from .keeping import SparsityCallback, SparsityKeeper
from .sparse_weights import SparseWeight, unwrap


logger = get_logger(__name__)


class NeuronALCallback(SparsityCallback, ExportableState):
    """Callback that prunes the model during training, once or gradually, and keeps it sparse from then on.

    Calibration sequences are drawn from the Trainer's training data. After pruning, the optimizer's state of the pruned
    weights is cleared, and the search for the best checkpoint starts again, so `load_best_model_at_end` loads a model of
    the final sparsity. Under DDP the processes share the work. Earlier zeros stay, so the sparsity can exceed the requested
    one. Training that resumes from a checkpoint continues the schedule.

    Args:
        config ([`NeuronALConfig`] or `dict`): how to prune. `dataset` and `sparsity` are not used.
        schedule (`Mapping[int, float]`):
            Step after which to prune -> sparsity to reach, both rising: `{0: 0.5, 100: 0.7}`. 0: before the first step.

    Raises:
        `ValueError`, `TypeError`: an argument is invalid, or does not fit the training when it begins.
    """

    def __init__(self, config: NeuronALConfig | Mapping[str, Any], schedule: Mapping[int, float]):
        super().__init__()
        self.config = NeuronALConfig.from_dict(dict(config)) if isinstance(config, Mapping) else config
        self.schedule = _check_schedule(schedule)
        self.stages = {step: replace(self.config, sparsity=sparsity) for step, sparsity in self.schedule.items()}
        self.sparsity_config: dict | None = None
        self.ids = torch.empty(0, 0, dtype=torch.int64)

    def state(self) -> dict:
        """Return the state of the callback for a checkpoint."""
        schedule = {str(step): sparsity for step, sparsity in self.schedule.items()}
        attributes = {"sparsity_config": self.sparsity_config}
        return {"args": {"config": self.config.to_dict(), "schedule": schedule}, "attributes": attributes}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        model = unwrap(model)
        self._check_loaded(model, state)
        if late := next((step for step in self.schedule if step > state.max_steps), None):
            raise ValueError(f"The schedule prunes at step {late}, but training ends at step {state.max_steps}.")
        self.sparsity_config = read_sparsity_config(model.config)
        if state.global_step:  # resumed: the model in memory may have been pruned after the checkpoint
            saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
            saved = saved[-1] if isinstance(saved, list) else saved
            self.sparsity_config = saved.get("attributes", {}).get("sparsity_config")
        record_sparsity(model, self.sparsity_config)
        for stage in self.stages.values():  # raises errors now, not at a later step
            check_prune(model, stage, further=self.sparsity_config is not None)
        if self.config.methods.needs_calibration:
            self.ids = training_sequences(kwargs["train_dataloader"], self.config, model.config)
        self.keeper.release()
        self.keeper = SparsityKeeper([])
        if self.sparsity_config is not None:
            self._keep(model)
        if not state.global_step:
            self._prune_if_due(model, optimizer, state)

    def on_step_end(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self._prune_if_due(unwrap(model), optimizer, state)

    def _prune_if_due(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: TrainerState) -> None:
        stage = self.stages.get(state.global_step)
        if stage is None:
            return
        with preserve_rng_state():
            context = prepare(model, stage, self.ids, further=True)
            report = prune_model(context)
        if self.keeper.weights:
            self.keeper.apply()  # some saliencies update other weights, even those that were zero already
            achieved, blocks, projections = measure_sparsity(context.decoder)
            report = replace(report, achieved_sparsity=achieved, blocks=blocks, projections=projections)
            record_sparsity(model, make_sparsity_config(context.decoder, report))
        self.sparsity_config = getattr(model.config, KEY)
        self._keep(model)
        _clear_state(optimizer, self.keeper.weights)
        state.best_metric = state.best_model_checkpoint = state.best_global_step = None
        logger.warning(f"Pruned after step {state.global_step}: {self.keeper.sparsity:.2%} of the weights are zero.")


def _clear_state(optimizer: torch.optim.Optimizer, weights: list[SparseWeight]) -> None:
    """Set the optimizer's state of pruned weights to zero where it has the weight's shape: momentum, second moments."""
    for weight in weights:
        for value in optimizer.state.get(weight.owner, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == weight.mask.shape:
                weight.apply_to(value)


def _check_schedule(schedule: Mapping[Any, Any]) -> dict[int, float]:
    """Return the schedule ordered by step. Raise `ValueError` unless the sparsities rise."""
    # In JSON, steps are text.
    stages = dict(sorted((int(step), float(sparsity)) for step, sparsity in schedule.items()))
    rising = bool(stages) and all(earlier < later for earlier, later in pairwise(stages.values()))
    if not rising or len(stages) < len(schedule) or min(stages, default=-1) < 0:
        raise ValueError(
            f"schedule is {dict(schedule)}: expected steps with rising sparsities, such as {{0: 0.5, 100: 0.7}}."
        )
    return stages


def training_sequences(loader: DataLoader, config: NeuronALConfig, model_config: PreTrainedConfig) -> torch.Tensor:
    """Draw calibration sequences, int64, (num_samples, seq_length), on the CPU, equal in every process.

    Examples are drawn with the config's seed (streams without a length keep their order) and collated one by one. Their
    tokens, without padding, are joined and cut. Without `seq_length`, sequences are as long as the longest example. A BOS
    token, see [`resolve_bos`], begins every sequence and occurs nowhere else.
    """
    bos = resolve_bos(model_config, None, config.add_bos)
    added = int(bos is not None)
    allowed, length, pieces, count = resolve_seq_length(model_config, config.seq_length) - added, 1, [], 0
    with preserve_rng_state():
        for piece in _token_ids(loader, config.seed):
            piece = piece if bos is None else piece[piece != bos]
            pieces.append(piece)
            count += len(piece)
            length = allowed if config.seq_length is not None else min(allowed, max(length, len(piece)))
            if count >= config.num_samples * length:
                break
    if count < config.num_samples * length:
        raise ValueError(
            f"The training data holds {count} tokens, but {config.num_samples} calibration sequences of {length + added} need "
            f"{config.num_samples * length}: set num_samples to at most {count // length}, or a smaller seq_length."
        )
    return with_bos(torch.cat(pieces)[: config.num_samples * length].view(config.num_samples, length), bos)


def _token_ids(loader: DataLoader, seed: int) -> Iterator[torch.Tensor]:
    """Yield the token ids of the examples, int64, (tokens,), on the CPU, without padding."""
    dataset: Any = loader.dataset
    examples = dataset
    if hasattr(dataset, "__len__"):
        examples = (dataset[index] for index in random.Random(seed).sample(range(len(dataset)), len(dataset)))
    for example in examples:
        batch = loader.collate_fn([example])
        ids, used = batch["input_ids"], batch.get("attention_mask")
        used = torch.ones_like(ids) if used is None or used.shape != ids.shape else used
        yield ids[used.bool()].cpu().long()
