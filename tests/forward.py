"""What projections receive in a model's own forward, written apart from the package: hooks, and a spy for experts."""

import torch
from torch.overrides import TorchFunctionMode


def squared_norms(model, ids, projections) -> dict[str, torch.Tensor]:
    """Name -> squared norms of the inputs, shape (sequences, in); projections (name -> `Projection`) of one model."""
    norms = {name: torch.zeros(len(ids), projection.shape[1]) for name, projection in projections.items()}
    for index, sequence in enumerate(ids):
        for name, inputs in inputs_of(model, sequence[None], projections).items():
            norms[name][index] = inputs.square().sum(dim=0)
    return norms


def token_counts(model, ids, projections) -> dict[str, int]:
    """Name -> tokens received."""
    counts = dict.fromkeys(projections, 0)
    for sequence in ids:
        for name, inputs in inputs_of(model, sequence[None], projections).items():
            counts[name] += int(inputs.any(dim=-1).sum())
    return counts


def inputs_of(model, ids, projections) -> dict[str, torch.Tensor]:
    """Name -> inputs, shape (tokens, in); an expert that no token was routed to is missing."""
    found, handles, experts = {}, [], {}
    for name, projection in projections.items():
        if projection.expert is None:
            handles.append(
                projection.module.register_forward_pre_hook(
                    lambda _module, args, name=name: found.__setitem__(name, args[0].reshape(-1, args[0].shape[-1]))
                )
            )
        else:
            experts[projection.owner[projection.expert].data_ptr()] = name
    implementation = model.config._experts_implementation
    try:
        model.set_experts_implementation("eager")
        with torch.no_grad(), _Spy(experts, found):
            model(ids, use_cache=False)
    finally:
        model.set_experts_implementation(implementation)
        for handle in handles:
            handle.remove()
    return found


class _Spy(TorchFunctionMode):
    """Notes what is multiplied with a matrix that begins at a given address."""

    def __init__(self, addresses, found):
        self.addresses, self.found = addresses, found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if len(args) > 1 and all(isinstance(value, torch.Tensor) for value in args[:2]) and args[1].ndim > 1:
            if function is torch.bmm:
                for inputs, weight in zip(*args):
                    self._note(inputs[inputs.any(dim=-1)], weight)
            elif function is torch.nn.functional.linear or "matmul" in getattr(function, "__name__", ""):
                self._note(*args[:2])
        return function(*args, **(kwargs or {}))

    def _note(self, inputs, weight):
        name = self.addresses.get(weight.data_ptr())
        if name is not None and len(inputs):
            self.found[name] = inputs
