"""The loss of a fine-tune: cross-entropy with the text, mixed with the divergence from the dense model's predictions.

Logits of all tokens would take gigabytes with a large vocabulary. Here the decoders return their last hidden states, and
both heads and the loss run on a few tokens at a time.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.functional import linear, log_softmax

from .sparse_weights import is_sharded, unwrap


CHUNK_BYTES = 2**27  # of float32 logits at a time
ROUNDING = 0.02  # relative difference of equal logits, in bfloat16
LABELS_TO_IGNORE = -100


class Predictor:
    """A language model whose logits are computed for a few tokens at a time, if its head allows it.

    Its head has to be a linear layer, followed by the scaling or soft-capping that its config names. The first call compares
    with the model's own logits; if they differ, or the head is another module, all logits are computed at once.
    """

    def __init__(self, model: nn.Module):
        self.model = unwrap(model)
        self.in_chunks: bool | None = None  # None: still unknown

    def predict(self, model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """Run the model, or its wrapper for several processes, on a batch of shape (N, L).

        Return its last hidden states, (N, L, hidden size), and True; or its logits, (N, L, vocabulary), and False.
        """
        decoder = self.model.get_decoder()
        decoder = self.model.base_model if decoder is self.model else decoder
        if self.in_chunks is None and not self._is_simple(decoder):
            self.in_chunks = False
        if self.in_chunks is False or isinstance(model, nn.DataParallel):  # whose replicas each have a decoder
            return model(**inputs, use_cache=False).logits, False
        kept: list[torch.Tensor] = []
        hook = decoder.register_forward_hook(lambda _module, _inputs, output: kept.append(output[0]))
        try:
            last = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
        finally:
            hook.remove()
        (hidden,) = kept
        if self.in_chunks is None:
            with torch.no_grad():
                error = (self.logits(hidden[:, -1]) - last.float()).abs().max() / last.abs().max()
            # Some decoders drop all hidden states but the last, too.
            self.in_chunks = hidden.shape[1] == inputs["input_ids"].shape[1] and bool(error < ROUNDING)
        return (hidden, True) if self.in_chunks else self.predict(model, inputs)

    def _is_simple(self, decoder: nn.Module) -> bool:
        simple = type(self.head) is nn.Linear and not is_sharded(self.head.weight) and decoder is not self.model
        return simple and "logits_to_keep" in self.model.forward.__annotations__

    @property
    def head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the float32 logits of hidden states of shape (tokens, hidden size)."""
        weight, bias = self.head.weight.to(hidden.dtype), self.head.bias
        return self.finish(linear(hidden, weight, None if bias is None else bias.to(hidden.dtype)).float())

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and soft-cap logits as the model's config says."""
        config = self.model.config.get_text_config()
        scale, divisor, cap = (
            getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "final_logit_softcapping")
        )
        logits = logits if scale is None else logits * scale
        logits = logits if divisor is None else logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap


def mixed_loss(
    student: Predictor,
    teacher: Predictor | None,
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    labels: torch.Tensor,
    kl_weight: float,
) -> torch.Tensor:
    """Return `kl_weight * KL(teacher || student) + (1 - kl_weight) * cross-entropy`, in nats, the mean over predicted tokens.

    Args:
        student, teacher: the sparse and the dense model; without a teacher, the loss is the cross-entropy.
        model (`nn.Module`): the student, or its wrapper for several processes.
        inputs (`dict`): of shape (N, L), for both models.
        labels (`torch.Tensor`): token ids, int64, (N, L); a token with label -100 is not predicted.
        kl_weight (`float`): from 0 to 1.
    """
    targets = labels[:, 1:].flatten()
    chosen = targets != LABELS_TO_IGNORE
    targets = targets[chosen]
    if not len(targets):
        raise ValueError("No token of a batch has a label to learn from: all are -100.")

    def of_chosen(states: torch.Tensor) -> torch.Tensor:
        states = states[:, :-1].flatten(0, 1)
        return states if len(targets) == len(states) else states[chosen]

    expected = None
    if teacher is not None and kl_weight > 0:
        with torch.no_grad():
            states, in_chunks = teacher.predict(teacher.model, inputs)
            states = of_chosen(states).to(targets.device)
            expected = (
                (lambda part: teacher.logits(states[part])) if in_chunks else (lambda part: states[part].float())
            )
    hidden, in_chunks = student.predict(model, inputs)
    hidden = of_chosen(hidden)
    if not in_chunks:
        return _LogitLoss.apply(hidden, targets, expected, kl_weight)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    return _HeadLoss.apply(hidden, student.head.weight, student.head.bias, student, targets, expected, kl_weight)


Expected = Callable[[slice], torch.Tensor] | None  # the dense model's logits of some of the tokens, float32


def _parts(tokens: int, vocab_size: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocab_size))
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _loss_of_part(
    logits: torch.Tensor, targets: torch.Tensor, part: slice, expected: Expected, kl_weight: float, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the summed loss of a part's tokens and, `with_gradient`, its gradient with respect to the logits, else None."""
    predicted, labels = log_softmax(logits, dim=-1), targets[part, None]
    surprise = -predicted.gather(1, labels).sum()
    if expected is None:
        if not with_gradient:
            return surprise, None
        gradient = predicted.exp_()
        return surprise, gradient.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=gradient.dtype))
    wanted = log_softmax(expected(part), dim=-1)
    shares = wanted.exp()
    divergence = (wanted.sub_(predicted).mul_(shares)).sum()
    loss = kl_weight * divergence + (1 - kl_weight) * surprise
    if not with_gradient:
        return loss, None
    gradient = predicted.exp_().sub_(shares, alpha=kl_weight)
    return loss, gradient.scatter_add_(1, labels, torch.full_like(labels, kl_weight - 1, dtype=gradient.dtype))


class _HeadLoss(torch.autograd.Function):
    """Mean loss of a head on hidden states. The forward computes the gradients too, while a part's logits exist."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, student, targets, expected, kl_weight):
        with_gradient = hidden.requires_grad or weight.requires_grad
        tokens, total = len(targets), torch.zeros((), device=hidden.device)
        to_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        to_weight = torch.zeros_like(weight) if weight.requires_grad else None
        to_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
        used = weight.to(hidden.dtype)
        for part in _parts(tokens, len(weight)):
            raw = linear(hidden[part], used, None if bias is None else bias.to(hidden.dtype)).float()
            with torch.enable_grad():
                finished = student.finish(raw.requires_grad_())
            loss, gradient = _loss_of_part(finished.detach(), targets, part, expected, kl_weight, with_gradient)
            total += loss
            if gradient is None:
                continue
            if finished is not raw:
                (gradient,) = torch.autograd.grad(finished, raw, gradient)
            gradient = gradient.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(gradient, used, out=to_hidden[part])
            if to_weight is not None and to_weight.dtype == gradient.dtype:
                to_weight.addmm_(gradient.T, hidden[part])
            elif to_weight is not None:
                to_weight += gradient.T @ hidden[part]
            if to_bias is not None:
                to_bias += gradient.sum(0)
        ctx.gradients, ctx.tokens = (to_hidden, to_weight, to_bias), tokens
        return total / tokens

    @staticmethod
    def backward(ctx, scale):
        # Not before, since float16 has no numbers below 6e-8: a loss is scaled up, which `scale` includes.
        scale = scale / ctx.tokens
        gradients = [None if gradient is None else gradient.mul_(scale) for gradient in ctx.gradients]
        ctx.gradients = None
        return (*gradients, None, None, None, None)


class _LogitLoss(torch.autograd.Function):
    """Mean loss of logits that were computed all at once."""

    @staticmethod
    def forward(ctx, logits, targets, expected, kl_weight):
        tokens, total = len(targets), torch.zeros((), device=logits.device)
        gradients = torch.empty_like(logits) if logits.requires_grad else None
        for part in _parts(tokens, logits.shape[-1]):
            loss, gradient = _loss_of_part(
                logits[part].float(), targets, part, expected, kl_weight, gradients is not None
            )
            total += loss
            if gradient is not None:
                gradients[part] = gradient
        ctx.gradients, ctx.tokens = gradients, tokens
        return total / tokens

    @staticmethod
    def backward(ctx, scale):
        gradients, ctx.gradients = ctx.gradients.mul_(scale / ctx.tokens), None
        return gradients, None, None, None
