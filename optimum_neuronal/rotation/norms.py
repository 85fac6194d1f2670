"""The norms in front of attention, MLP and head: how they are found, and what they do to the residual stream.

A norm computes `g * n(x) + b`. The n of an RMS norm commutes with every rotation, `n(x R) = n(x) R`; the n of a layer norm,
which removes the mean, with those that keep the vector of ones. The scale g is folded into what reads the norm's output;
the bias, which then becomes `(b / g) R`, stays in the norm.
"""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ..compat import accelerate


ATTENTION_NORMS = ("input_layernorm", "self_attn_layer_norm", "ln_1", "norm_1", "ln_attn", "attention_layernorm")
MLP_NORMS = ("post_attention_layernorm", "final_layer_norm", "ln_2", "norm_2", "ln_mlp", "feedforward_layernorm")
FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "layer_norm", "ln_f", "norm_f")
# Of a norm with a bias, relative to its largest scale: a bias that is divided by less would be rounded badly.
LEAST_SCALE = 1e-3


def find_norm(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """Return the submodule with the first of the names that the module has, whatever it is."""
    return next((own for name in names if (own := getattr(module, name, None)) is not None), None)


def is_norm(module: nn.Module | None) -> bool:
    """Return True for RMS norms and layer norms."""
    return any(kind in type(module).__name__ for kind in ("RMSNorm", "LayerNorm"))


def removes_mean(norm: nn.Module, size: int) -> bool:
    """Return True for a layer norm of this number of features, False for an RMS norm."""
    return not bool(_normed(norm, 1, torch.ones(size)).any())


def neutral_value(norm: nn.Module) -> int:
    """Return the weight with which a norm scales by 1: 1, or 0 where it multiplies by `1 + weight`."""
    return 0 if bool(_normed(norm, 0, torch.arange(len(norm.weight))).any()) else 1


def scale_of(norm: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return the factor by which a norm with this weight scales every feature, shape (hidden,)."""
    return weight + (1 - neutral_value(norm))


def can_be_folded(norm: nn.Module) -> bool:
    """Return True if the norm has no bias, or no scale that is too small to divide the bias by it, or no weights yet."""
    if getattr(norm, "bias", None) is None:
        return True
    weight = accelerate.weights_map(norm)["weight"] if accelerate.is_offloaded(norm) else norm.weight
    if weight.is_meta:
        return True
    sizes = scale_of(norm, weight.detach().float()).abs()
    return bool(sizes.min() >= LEAST_SCALE * sizes.max())


def _normed(norm: nn.Module, weight: int, values: torch.Tensor) -> torch.Tensor:
    """Return what a norm makes of values, shape (features,), if all of its weights were this one, without its bias."""
    probe = copy.copy(norm)
    probe._parameters = dict(norm._parameters)  # a bias that is None stays
    for name, parameter in norm.named_parameters():
        filled = torch.full(parameter.shape, float(weight if name == "weight" else 0))
        probe._parameters[name] = nn.Parameter(filled, requires_grad=False)
    return type(norm).forward(probe, values.float())  # past hooks, which would read offloaded weights
