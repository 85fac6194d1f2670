"""`SparseTrainer`: a `Trainer` that keeps every zero, and can learn from the dense model.

Logits of all tokens would take gigabytes with a large vocabulary. Here a model computes its last hidden states first, and
then the loss and its gradients for a few tokens at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax, nll_loss
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import ModelOutput

from ..blocks.block_inputs import replaced_forward
from ..common.torch_state import preserve_rng_state
from ..common.validation import check_number
from .keeping import SparsityCallback
from .sparse_weights import is_sharded, unwrap


CHUNK_BYTES = 2**27  # of float32 logits at a time
COMPARED = 4  # tokens whose logits are compared with the model's own
ROUNDING = 1e-4  # relative difference of equal logits, in float32
LABELS_TO_IGNORE = -100

Head = Callable[[torch.Tensor], torch.Tensor]  # states of shape (tokens, size) -> logits of shape (tokens, vocabulary)


class SparseTrainer(Trainer):
    """A `Trainer` of a sparse model that keeps every zero, see [`SparsityCallback`].

    With a `teacher`, the model learns to predict the next token as the dense model does. The loss is
    `kl_weight * KL(teacher || model) + (1 - kl_weight) * cross-entropy`, the mean over the predicted tokens of a step, of all
    its micro-batches and processes. In evaluations it is the cross-entropy alone, whose exponential is the perplexity, the
    mean over a batch's tokens; batches count by their examples, as with `Trainer`. Logits are computed for a few tokens at a
    time, so that a large vocabulary needs little memory; `predict` and metrics take all of a batch.

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
        trainer_kwargs: other arguments of `Trainer`. Batches hold `input_ids` and `labels`, as for a causal language model.

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
            raise ValueError("SparseTrainer has its own loss: leave out compute_loss_func and label_smoothing_factor.")
        self._student, self._teacher = Predictor(model), None if teacher is None else Predictor(teacher)
        self.kl_weight, self._all_logits = kl_weight, False
        callbacks = list(callbacks or ())
        if not any(isinstance(callback, SparsityCallback) for callback in callbacks):
            callbacks.append(SparsityCallback())
        super().__init__(model, args, callbacks=callbacks, **trainer_kwargs)
        self.model_accepts_loss_kwargs = True  # Trainer adds up the losses of a step's batches, without a mean
        if self._teacher is not None:
            check_vocabularies(self._student.model, self._teacher.model)
            self._teacher.model.to(self.args.device).eval()

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """Return the batches of a step, and the number of tokens that a process predicts in it, on average."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        count = sum(int((batch["labels"][:, 1:] != LABELS_TO_IGNORE).sum()) for batch in batches)
        counts = self.accelerator.reduce(torch.tensor(float(count), device=device))
        return batches, counts.clamp(min=1) / self.accelerator.num_processes

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss; with `return_outputs`, also a dict, without logits unless an evaluation needs them."""
        if return_outputs and self._all_logits:
            return super().compute_loss(model, inputs, return_outputs)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        teacher, count = (self._teacher, num_items_in_batch) if model.training else (None, None)
        loss = mixed_loss(self._student, teacher, model, inputs, labels, self.kl_weight, count)
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple:
        """Return loss, logits and labels, as `Trainer` does."""
        self._all_logits = not prediction_loss_only
        return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)


def check_vocabularies(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise `ValueError` unless two models have vocabularies of the same size."""
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The teacher predicts {sizes[1]} tokens and the sparse model {sizes[0]}: expected the dense model that it was "
            "pruned from."
        )


class Predictor:
    """A language model whose logits are computed for a few tokens at a time, if a token's depend on its hidden state alone.

    The first call compares some with the model's own logits. If they differ, all logits are computed at once.
    """

    def __init__(self, model: nn.Module):
        self.model = unwrap(model)
        self.in_chunks: bool | None = None  # None: still unknown

    def predict(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Head]:
        """Run the model, or its wrapper for several processes, on a batch of shape (N, L).

        Return states of shape (N, L, size) and the function that makes logits of them: the last hidden states and the
        model's head, or the logits of all tokens.
        """
        if self.in_chunks is None:
            self.in_chunks = self._head_is_separate(inputs["input_ids"].device)
        if not self.in_chunks or isinstance(model, nn.DataParallel):  # whose replicas each have a decoder
            return model(**inputs, use_cache=False).logits, torch.Tensor.float
        _, output = self._run(model, inputs)
        return output[0], lambda states: self._logits(states, type(output))

    def _run(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
        """Return the logits of the last tokens, and the output of the model below its head."""
        outputs: list[Any] = []
        with self.model.base_model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)):
            logits = model(**inputs, use_cache=False, logits_to_keep=COMPARED).logits
        return logits, outputs[0]

    def _logits(self, states: torch.Tensor, output: type[ModelOutput]) -> torch.Tensor:
        """Return float32 logits: run the model on some tokens, with these states, (tokens, size), as the last hidden ones."""
        ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        with replaced_forward(self.model.base_model, lambda *_, **__: output(last_hidden_state=states[None])):
            return self.model(input_ids=ids, use_cache=False).logits[0].float()

    @torch.no_grad()
    def _head_is_separate(self, device: torch.device) -> bool:
        """Return True if the logits of a token can be computed from its last hidden state alone."""
        model, ids = self.model, torch.arange(2 * COMPARED, device=device)[None]
        forward = type(model).forward  # without accelerate's autocast
        known = model.base_model is not model and "logits_to_keep" in forward.__annotations__
        if not known or any(map(is_sharded, model.parameters())):
            return False
        exact = torch.autocast(device.type, enabled=False)
        with preserve_rng_state(), exact, replaced_forward(model, partial(forward, model)):
            logits, output = self._run(model, {"input_ids": ids})
            if not isinstance(output, ModelOutput) or output[0].shape[:2] != ids.shape:
                return False  # some decoders drop all hidden states but the last, too
            own = self._logits(output[0][0].flip(0), type(output)).flip(0)[-COMPARED:]
        rounding = max(ROUNDING, torch.finfo(output[0].dtype).eps)
        return bool((own - logits[0]).abs().max() <= rounding * logits.abs().max())


def mixed_loss(
    student: Predictor,
    teacher: Predictor | None,
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    labels: torch.Tensor,
    kl_weight: float,
    count: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Return `kl_weight * KL(teacher || student) + (1 - kl_weight) * cross-entropy`, in nats.

    Args:
        student, teacher: the sparse and the dense model; without a teacher, the loss is the cross-entropy.
        model (`nn.Module`): the student, or its wrapper for several processes.
        inputs (`dict`): of shape (N, L), for both models.
        labels (`torch.Tensor`): token ids, int64, (N, L); a token with label -100 is not predicted.
        kl_weight (`float`): from 0 to 1.
        count (*optional*): what the sum over the predicted tokens is divided by. None: their number.
    """
    targets = labels[:, 1:].flatten()
    chosen = targets != LABELS_TO_IGNORE
    targets = targets[chosen]

    def of_chosen(states: torch.Tensor) -> torch.Tensor:
        states = states[:, :-1].flatten(0, 1)
        return states if len(targets) == len(states) else states[chosen]

    expected, expected_head = None, None
    if teacher is not None and kl_weight > 0:
        with torch.no_grad():
            expected, expected_head = teacher.predict(teacher.model, inputs)
            expected = of_chosen(expected)
    states, head = student.predict(model, inputs)
    states = of_chosen(states)

    def loss_of(part: slice, states: torch.Tensor) -> torch.Tensor:
        predicted, labels = log_softmax(head(states), dim=-1), targets[part]
        if expected is None:
            return nll_loss(predicted, labels, reduction="sum")
        with torch.no_grad():
            wanted = log_softmax(expected_head(expected[part]).to(predicted.device), dim=-1)
        loss = kl_weight * kl_div(predicted, wanted, reduction="sum", log_target=True)
        return loss if kl_weight == 1 else loss + (1 - kl_weight) * nll_loss(predicted, labels, reduction="sum")

    size = max(1, CHUNK_BYTES // (4 * student.model.get_output_embeddings().weight.shape[0]))
    starts = range(0, max(1, len(targets)), size)  # one part without labels, whose gradients are zero
    parts = [slice(start, start + size) for start in starts]
    weights = [parameter for parameter in student.model.parameters() if parameter.requires_grad]
    return _sum_of_parts(loss_of, parts, states, weights, len(targets) if count is None else count)


def _sum_of_parts(
    loss_of: Callable[[slice, torch.Tensor], torch.Tensor],
    parts: list[slice],
    states: torch.Tensor,
    weights: list[nn.Parameter],
    count: torch.Tensor | int,
) -> torch.Tensor:
    """Return the sum over all parts of `loss_of(part, states[part])`, divided by a count, differentiated part by part."""
    total = torch.zeros((), device=states.device)
    gradients = {states: torch.zeros_like(states)} if states.requires_grad else {}
    for part in parts:
        piece = states.detach()[part].requires_grad_()
        loss = loss_of(part, piece)
        total += loss.detach()
        if not loss.requires_grad:
            continue
        of_piece, *of_weights = torch.autograd.grad(loss, [piece, *weights], allow_unused=True)
        for tensor, gradient in zip(weights, of_weights):
            if gradient is not None:
                gradients[tensor] = gradients[tensor].add_(gradient) if tensor in gradients else gradient
        if states.requires_grad and of_piece is not None:
            gradients[states][part] = of_piece
    return _WithGradients.apply(total, count, list(gradients.values()), *gradients)


class _WithGradients(torch.autograd.Function):
    """A sum divided by a count, whose gradients with respect to some tensors are known before the division."""

    @staticmethod
    def forward(ctx, total, count, gradients, *_):
        ctx.count, ctx.gradients = count, gradients
        return total / count

    @staticmethod
    def backward(ctx, scale):
        # Not before, since float16 has no numbers below 6e-8: a loss is scaled up, which `scale` includes.
        gradients = [gradient.mul_(scale / ctx.count) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, None, *gradients
