import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from optimum_neuronal import NeuronALConfig, NeuronALPruner, compare
from optimum_neuronal.pruning.context import alone_with


def config():
    return NeuronALConfig(0.5, saliency="wanda", topup="uniform", num_samples=12)


def test_the_second_thread_is_refused_and_the_first_undisturbed(llama, ids):
    expected = NeuronALPruner(config()).prune(copy.deepcopy(llama), ids).state_dict()
    with ThreadPoolExecutor(1) as executor, alone_with(llama):
        with pytest.raises(RuntimeError, match="Another thread is pruning this model: wait"):
            executor.submit(NeuronALPruner(config()).prune, llama, ids).result()
        executor.submit(NeuronALPruner(config()).prune, copy.deepcopy(llama), ids).result()
    NeuronALPruner(config()).prune(llama, ids)
    assert all(torch.equal(value, expected[key]) for key, value in llama.state_dict().items())


def test_a_model_that_shares_its_weights_is_refused_too(llama):
    with alone_with(llama), pytest.raises(RuntimeError, match="prune a copy"), alone_with(llama.model):
        pass
    with alone_with(llama.model):
        pass


def test_a_comparison_is_refused_while_the_model_is_pruned(llama, ids):
    with alone_with(llama), pytest.raises(RuntimeError, match="Another thread"):
        compare(
            llama, dataset=ids, evaluate={"test": ids}, sparsities=[0.5], saliencies=["magnitude"], topups=["uniform"]
        )


def test_a_failed_prune_lets_go(llama, ids):
    with pytest.raises(ValueError):
        NeuronALPruner(config()).prune(llama, ids + 1000)
    NeuronALPruner(config()).prune(llama, ids)
