import copy
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import make_model
from several_processes import in_processes
from sparse import make_sparse, same_zeros, step, zeros_of
from torch import nn
from torch.nn.utils import prune
from torch.optim import optimizer as torch_optimizer
from transformers import Adafactor, TrainerState

from optimum_neuronal import SparsityCallback, keep_sparsity
from optimum_neuronal.training.keeping import SparsityLostError


OPTIMIZERS = (
    partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    partial(torch.optim.SGD, lr=1e-1, momentum=0.9, nesterov=True),
    partial(Adafactor, lr=1e-2, relative_step=False),
)


def test_an_optimizers_step_leaves_other_models_to_autograd(ids):
    """What one model's backward still needs, another one's step does not touch."""
    first, second = make_sparse(), make_sparse("gpt2")
    zeros = zeros_of(first), zeros_of(second)
    optimizers = [Restless(model.parameters(), lr=0.1) for model in (first, second)]
    with keep_sparsity(first), keep_sparsity(second):
        loss = first(input_ids=ids[:2], labels=ids[:2]).loss
        step(second, optimizers[1], ids[:2])
        loss.backward()
        optimizers[0].step()
    assert same_zeros(first, zeros[0]) and same_zeros(second, zeros[1])


class Restless(torch.optim.SGD):
    """Changes weights whose gradients are zero too, as Muon does."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= 0.1


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS, ids=["adamw", "fused adamw", "sgd", "adafactor"])
def test_trains_as_torchs_own_masks_do(make_optimizer, ids):
    """torch.nn.utils.prune computes with weight * mask: the kept weights come out bit-equal, clipping included."""
    model = make_sparse()
    reference, zeros = copy.deepcopy(model), zeros_of(model)
    for key, zero in zeros.items():
        module = reference.get_submodule(key.removesuffix(".weight"))
        prune.custom_from_mask(module, "weight", ~zero)
    ours, theirs = (make_optimizer(copied.parameters()) for copied in (model, reference))
    with keep_sparsity(model):
        for _ in range(3):
            step(model, ours, ids[:2], max_norm=0.5)
            step(reference, theirs, ids[:2], max_norm=0.5)
    for key in zeros:
        module = reference.get_submodule(key.removesuffix(".weight"))
        prune.remove(module, "weight")
        assert torch.equal(model.get_parameter(key), module.weight), key
    assert same_zeros(model, zeros) and not same_zeros(make_sparse(), zeros_of(make_model("llama")))
    for key in zeros:
        assert not torch.signbit(model.get_parameter(key)[zeros[key]]).any(), "-0.0 would be saved as a value"


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_oss"])
def test_any_layout_and_any_optimizer(family, ids):
    model = make_sparse(family)
    zeros = zeros_of(model)
    with keep_sparsity(model):
        optimizer = Restless(model.parameters(), lr=0.1)  # made after the masks
        for _ in range(2):
            step(model, optimizer, ids[:2])
    assert same_zeros(model, zeros)
    step(model, optimizer, ids[:2])
    assert not same_zeros(model, zeros), "nothing is left behind"


def test_by_hand(ids):
    model = make_sparse()
    zeros, keeper = zeros_of(model), keep_sparsity(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer, ids[:2])
    with pytest.raises(SparsityLostError, match=r"\d+ pruned weights are no longer zero \(model.layers.0"):
        keeper.verify()
    keeper.apply()
    keeper.verify()
    assert same_zeros(model, zeros)
    model.model.layers[1].mlp.up_proj.weight.data[zeros["model.layers.1.mlp.up_proj.weight"]] = torch.nan
    with pytest.raises(SparsityLostError, match="model.layers.1.mlp.up_proj"):
        keeper.verify()


def test_the_own_error_of_a_loop_is_not_hidden():
    model, hooks = make_sparse(), len(torch_optimizer._global_optimizer_post_hooks)
    with pytest.raises(ZeroDivisionError), keep_sparsity(model):
        model.model.layers[0].mlp.up_proj.weight.data += 1
        1 / 0  # noqa: B018
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_accelerate(ids):
    model = make_sparse()
    zeros, accelerator = zeros_of(model), Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, Restless(model.parameters(), lr=0.1))
    with keep_sparsity(prepared):
        for part in ids.split(3):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(input_ids=part, labels=part).loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert same_zeros(model, zeros)
    Accelerator._shared_state = {}


def test_frozen_tied_and_resized(ids):
    """Only weights of projections are masked; those that are not trained are left alone."""
    model = make_sparse("gpt2", tie_word_embeddings=True)
    model.resize_token_embeddings(80)
    zeros = zeros_of(model)
    model.transformer.h[0].requires_grad_(False)
    frozen = copy.deepcopy(model.transformer.h[0].state_dict())
    embeddings = model.get_input_embeddings().weight
    assert embeddings is model.get_output_embeddings().weight
    before = embeddings.detach().clone()
    with keep_sparsity(model):
        step(model, Restless((p for p in model.parameters() if p.requires_grad), lr=0.1), ids[:2])
    assert same_zeros(model, zeros) and not torch.equal(embeddings, before)
    assert all(torch.equal(value, frozen[key]) for key, value in model.transformer.h[0].state_dict().items())


def _train_sharded(rank, count, ids):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_sparse()
    zeros, too_early = zeros_of(model), keep_sparsity(model)
    mesh = init_device_mesh("cpu", (count,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer, callback = Restless(model.parameters(), lr=0.1, momentum=0.9), SparsityCallback()
    with keep_sparsity(model):
        step(model, optimizer, ids[rank::count], max_norm=1.0)
    # As the Trainer does, which has FSDP on accelerators only.
    callback.on_train_begin(None, TrainerState(), None, model=model)
    model(input_ids=ids[rank::count], labels=ids[rank::count]).loss.backward()
    callback.on_pre_optimizer_step(None, None, None)
    optimizer.step()
    callback.on_optimizer_step(None, None, None)
    callback.on_train_end(None, None, None)
    for name, zero in zeros.items():
        weight = model.get_parameter(name)
        assert torch.equal(weight.full_tensor() == 0, zero)
        assert (optimizer.state[weight]["momentum_buffer"].full_tensor()[zero] == 0).all()
    with pytest.raises(RuntimeError, match="has another shape now: call keep_sparsity after"):
        too_early.apply()
    if rank == 0:
        model.model.layers[0].mlp.up_proj.weight.data.to_local().fill_(1)
    with pytest.raises(ValueError, match="zeros were lost"):
        keep_sparsity(model)


def test_fsdp(tmp_path, ids):
    """Every process masks its own part of the weights."""
    in_processes(2, _train_sharded, tmp_path, ids)


def test_what_cannot_be_kept(llama):
    with pytest.raises(ValueError, match="dense: only 0.00% of the weights"):
        keep_sparsity(llama)
    with pytest.raises(TypeError, match="Expected a transformers PreTrainedModel.*Linear"):
        keep_sparsity(nn.Linear(2, 2))
