"""`SparseTrainer`: a `Trainer` that keeps every zero, and can learn from the dense model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from ..common.validation import check_number
from .chunked_loss import LABELS_TO_IGNORE, Predictor, mixed_loss
from .keeping import SparsityCallback


class SparseTrainer(Trainer):
    """A `Trainer` of a sparse model that keeps every zero, see [`SparsityCallback`].

    With a `teacher`, the model learns to predict the next token as the dense model does. The loss is
    `kl_weight * KL(teacher || model) + (1 - kl_weight) * cross-entropy`, the mean over the predicted tokens of a batch. In
    evaluations it is the cross-entropy alone, whose exponential is the perplexity. Logits are computed for a few tokens at a
    time, so that a large vocabulary needs little memory.

    ```python
    trainer = SparseTrainer(model, arguments, teacher=dense, train_dataset=data)
    trainer.train()
    ```

    Args:
        model (`PreTrainedModel` or `PeftModel`): a sparse model; with LoRA, what [`keep_lora_sparse`] returned.
        args (`TrainingArguments`): as for `Trainer`.
        teacher (`PreTrainedModel`, *optional*):
            The dense model, with the same vocabulary. It is moved to the device of the training, and none of its weights
            changes. None: the loss is the cross-entropy.
        kl_weight (`float`): share of the teacher in the loss, from 0 to 1.
        callbacks (`list`): further callbacks.
        trainer_kwargs: other arguments of `Trainer`. Examples hold `input_ids`, and `labels` or, without them, every token
            that `attention_mask` does not exclude is learned.

    Raises:
        `ValueError`: when training begins with a dense model, see [`keep_sparsity`]; the teacher has another vocabulary; an
            argument of `Trainer` asks for another loss.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: TrainingArguments | None = None,
        *,
        teacher: PreTrainedModel | None = None,
        kl_weight: float = 1.0,
        callbacks: Sequence[TrainerCallback] | None = None,
        **trainer_kwargs: Any,
    ):
        check_number("kl_weight", kl_weight, 0, 1)
        if trainer_kwargs.get("compute_loss_func") or (args is not None and args.label_smoothing_factor):
            raise ValueError(
                "SparseTrainer computes its own loss: leave out compute_loss_func and label_smoothing_factor."
            )
        self._student, self._teacher = Predictor(model), None if teacher is None else Predictor(teacher)
        self.kl_weight = kl_weight
        callbacks = list(callbacks or ())
        if not any(isinstance(callback, SparsityCallback) for callback in callbacks):
            callbacks.append(SparsityCallback())
        super().__init__(model, args, callbacks=callbacks, **trainer_kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, so Trainer averages accumulated ones
        if self._teacher is not None:
            check_vocabularies(self._student.model, self._teacher.model)
            self._teacher.model.to(self.args.device).eval()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss; with `return_outputs`, also a dict without logits."""
        inputs = _with_labels(inputs)
        labels = inputs.pop("labels")
        teacher = self._teacher if model.training else None
        loss = mixed_loss(self._student, teacher, model, inputs, labels, self.kl_weight)
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model: nn.Module, inputs: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Measure the loss of a batch. `Trainer` measures none without labels."""
        return super().prediction_step(model, _with_labels(inputs), *args, **kwargs)


def _with_labels(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with its labels or, without them, with every token that `attention_mask` does not exclude."""
    inputs = dict(inputs)
    if inputs.get("labels") is None:
        ids, used = inputs["input_ids"], inputs.get("attention_mask")
        inputs["labels"] = ids if used is None else ids.masked_fill(used == 0, LABELS_TO_IGNORE)
    return inputs


def check_vocabularies(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise `ValueError` unless two models have vocabularies of the same size."""
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The teacher predicts {sizes[1]} tokens and the sparse model {sizes[0]}: expected the dense model that it was "
            "pruned from."
        )
