import copy
import json
import signal

import pytest
import torch
from conftest import make_model, make_tokenizer
from optimum.quantization_base import OptimumQuantizer
from several_processes import in_processes
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, AutoTokenizer
from trial_helpers import same_state, state

from optimum_neuronal import NeuronALConfig, NeuronALPruner, save_pretrained
from optimum_neuronal import pruner as pruner_module
from optimum_neuronal.evaluation import perplexity
from optimum_neuronal.model.find_blocks import find_decoder
from optimum_neuronal.pruning import prune as prune_module
from optimum_neuronal.saliency import SALIENCIES


LAMBDAS = {"block_lambdas": (0.05, 0.15), "row_lambdas": (0.0, 0.1)}
NEURONAL = {"topup": "neuronal", "topup_args": LAMBDAS}


def config(sparsity=0.7, **fields):
    defaults = {"saliency": "wanda", "topup": "uniform", "num_samples": 12, "num_alignment_samples": 4}
    return NeuronALConfig(sparsity, **{**defaults, **fields})


@pytest.mark.parametrize("saliency", SALIENCIES.names())
def test_neuronal_is_the_default_and_serves_every_saliency(saliency, ids):
    pruner = NeuronALPruner(NeuronALConfig(0.6, saliency, num_samples=12, num_alignment_samples=2, topup_args=LAMBDAS))
    pruner.prune(make_model("llama"), ids)
    steps = {"block", "row"} if saliency != "sparsegpt" else {"block", "note"}
    assert pruner.config.topup == "neuronal" and pruner.report.decisions.keys() == steps
    assert abs(pruner.report.achieved_sparsity - 0.6) < 1e-3


@pytest.mark.parametrize(
    "fields", [{"topup": "neuronal"}, {"saliency": "sparsegpt", "topup": "owl"}, {"saliency": "alps"}], ids=str
)
def test_every_projection_has_its_zeros_within_one_weight(fields, ids):
    """Here a block's projections get the same share. Counts are rounded down."""
    model = make_model("llama")
    NeuronALPruner(config(0.617, **fields)).prune(model, ids)
    blocks = find_decoder(model).blocks
    for block in blocks:
        zeros = {p.name: int((p.weight == 0).sum()) for p in block.pruned}
        share = sum(zeros.values()) / block.numel
        assert all(abs(zeros[p.name] - share * p.numel) <= 1 for p in block.pruned)
    total = sum(int((p.weight == 0).sum()) for block in blocks for p in block.pruned)
    assert abs(total - 0.617 * sum(block.numel for block in blocks)) <= sum(len(block.pruned) for block in blocks)


def test_magnitude_uniform_equals_torch():
    """Per row, against torch.nn.utils.prune."""
    model = make_model("llama")
    linear = model.model.layers[1].mlp.down_proj
    expected = linear.weight.detach().clone()
    counts = torch.diff(torch.floor(torch.arange(33) * 48 * 0.7 + 1e-4)).long()
    for row in range(32):
        single = torch.nn.Linear(48, 1, bias=False)
        single.weight.data = expected[row : row + 1].clone()
        prune.l1_unstructured(single, "weight", amount=int(counts[row]))
        expected[row] = single.weight[0].detach()
    NeuronALPruner(config(saliency="magnitude")).prune(model)
    assert torch.equal(linear.weight, expected)


def test_the_batch_size_changes_no_bit_on_a_cpu(ids):
    """Not even of updated weights, where threads share so many rows that their number changes how sums are rounded."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    torch.set_num_threads(2)
    try:
        first, second = (
            NeuronALPruner(config(saliency="sparsegpt")).prune(make_model("llama", **wide), ids, batch_size=size)
            for size in (1, 4)
        )
    finally:
        torch.set_num_threads(1)  # as in all tests
    assert same_state(first, second.state_dict())


def test_the_same_seed_gives_the_same_masks(tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(i * 7) % 60}" for i in range(2000)))

    def pruned(seed, batch_size):
        pruner = NeuronALPruner(config(**NEURONAL, seed=seed, dataset=str(text), seq_length=16), tokenizer)
        return pruner.prune(make_model("llama", vocab_size=256), batch_size=batch_size)

    first = pruned(0, 1).state_dict()
    assert same_state(pruned(0, 4), first) and not same_state(pruned(1, 1), first)


class TestQuantize:
    """Prunes a model on disk, and saves it."""

    @pytest.mark.parametrize(("save_dtype", "expected"), [(None, torch.bfloat16), (torch.float16, torch.float16)])
    def test_it_computes_in_one_dtype_and_saves_in_the_checkpoints(self, save_dtype, expected, tmp_path, ids):
        make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "dense")
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config(), dtype=torch.float32)
        assert isinstance(pruner, OptimumQuantizer) and pruner.tokenizer is None
        with pytest.raises(ValueError, match="file_name is 'a': expected None"):  # an argument of optimum's
            NeuronALPruner.from_pretrained(tmp_path / "dense", "a", config=config())
        with pytest.raises(ValueError, match="file_prefix is 'a': expected None"):
            pruner.quantize(tmp_path / "dense", "a")
        model = pruner.quantize(tmp_path / "sparse", dataset=ids, save_dtype=save_dtype)
        assert (model.dtype, pruner.report.dtype) == (torch.float32, "float32")
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
        assert reloaded.dtype == expected and same_state(reloaded, model.to(expected).state_dict())

    @pytest.mark.parametrize("dtype", ["bfloat16", torch.int8])
    def test_a_dtype_that_cannot_hold_weights_is_refused_before_the_prune(self, dtype, tmp_path, ids):
        dense = make_model("llama")
        dense.save_pretrained(tmp_path / "dense")
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config())
        for save in (
            lambda: pruner.quantize(tmp_path / "sparse", dataset=ids, save_dtype=dtype),
            lambda: save_pretrained(dense, tmp_path / "sparse", dtype=dtype),
        ):
            with pytest.raises(TypeError, match="expected a floating-point one, such as torch.bfloat16"):
                save()
        assert pruner.report is None and not (tmp_path / "sparse").exists()

    def test_the_work_directory_is_held_until_the_model_is_saved(self, tmp_path, monkeypatch):
        make_model("llama").save_pretrained(tmp_path / "dense")
        first, second = (
            NeuronALPruner.from_pretrained(tmp_path / "dense", config=config(saliency="magnitude")) for _ in range(2)
        )
        errors = []

        def meanwhile(*_args):
            with pytest.raises(BlockingIOError) as caught:
                second.quantize(tmp_path / "other", work_dir=tmp_path / "work")
            errors.append(caught.value)

        monkeypatch.setattr(pruner_module, "save_pruned", meanwhile)
        first.quantize(tmp_path / "model", work_dir=tmp_path / "work")
        assert errors and not (tmp_path / "work").exists()

    def test_test_files_of_the_same_name(self, tmp_path, ids, monkeypatch, capfd):
        saved_with_own_tokenizer(tmp_path / "dense", 0)
        for folder, count in (("a", 3), ("b", 60)):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "test.txt").write_text(" ".join(f"w{i % count}" for i in range(64)))
        pruner = NeuronALPruner.from_pretrained(tmp_path / "dense", config=config(seq_length=16))
        with pytest.raises(TypeError, match="evaluate is 'wikitext2': expected a list"):
            pruner.quantize(tmp_path / "sparse", dataset=ids, evaluate="wikitext2")
        read, load, sizes = [], perplexity.load_documents, []
        monkeypatch.setattr(perplexity, "load_documents", lambda name, *more: read.append(name) or load(name, *more))

        def measured(*args, batch_size, measure=perplexity.evaluate_perplexity):
            sizes.append(batch_size)
            return measure(*args)

        monkeypatch.setattr(perplexity, "evaluate_perplexity", measured)
        files = (tmp_path / folder / "test.txt" for folder in ("a", "b"))
        pruner.quantize(tmp_path / "sparse", dataset=ids, evaluate=files, batch_size=3)
        assert len(read) == 2, "each once, for both measurements"
        assert sizes == [3] * 4 and capfd.readouterr().err.count("perplexity of the dense model, test.txt") == 2
        first, second = (pruner.report.evaluation[name] for name in ("test.txt", "test.txt (2)"))
        assert first["dense"] != second["dense"] and first["pruned"] != second["pruned"]


def saved_with_own_tokenizer(folder, offset):
    """A dense checkpoint with a tokenizer of its own, in which the word "w7" is another id."""
    make_model("llama", vocab_size=256).save_pretrained(folder)
    make_tokenizer(offset).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


class TestTokenizers:
    TEXT = [" ".join(f"w{i % 60}" for i in range(400))]

    @pytest.fixture(autouse=True)
    def dense(self, tmp_path):
        self.folder = tmp_path
        self.models = [saved_with_own_tokenizer(tmp_path / f"{offset}", offset) for offset in (0, 5)]

    def saved_id(self, pruner, model) -> int:
        """Of the word "w7" in the tokenizer that is saved with a model."""
        pruner.save(model, self.folder / "sparse", overwrite=True)
        return AutoTokenizer.from_pretrained(self.folder / "sparse").get_vocab()["w7"]

    def test_every_model_has_its_own(self):
        pruner = NeuronALPruner(config(seq_length=16))
        third, ids = saved_with_own_tokenizer(self.folder / "3", 3), torch.arange(12 * 16).view(12, 16)
        for model, data, number in ((self.models[0], self.TEXT, 7), (self.models[1], self.TEXT, 12), (third, ids, 10)):
            assert self.saved_id(pruner, pruner.prune(model, data)) == number

    def test_a_loaded_models_is_not_another_ones(self):
        pruner = NeuronALPruner.from_pretrained(self.folder / "0", config=config(seq_length=16))
        assert pruner.tokenizer.get_vocab()["w7"] == 7
        for model, number in ((self.models[1], 12), (pruner.model, 7)):
            pruner.prune(model, self.TEXT)
            assert pruner.tokenizer.get_vocab()["w7"] == number

    def test_a_prune_that_fails_leaves_tokenizer_and_report_of_the_last_one(self, monkeypatch):
        pruner = NeuronALPruner(config(seq_length=16))
        pruner.prune(self.models[0], self.TEXT)
        monkeypatch.setattr(pruner_module, "prune_model", lambda _context: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pruner.prune(self.models[1], self.TEXT)
        assert self.saved_id(pruner, self.models[0]) == 7

    def test_a_path_names_one_and_a_text(self, tmp_path):
        pruner = NeuronALPruner(NeuronALConfig(0.5, dataset=tmp_path / "text.txt"), tmp_path / "5")
        assert pruner.config.dataset == str(tmp_path / "text.txt") and pruner.tokenizer.get_vocab()["w7"] == 12

    def test_it_is_looked_for_where_its_model_is(self, tmp_path, ids, monkeypatch):
        inner = tmp_path / "repo" / "inner"
        saved_with_own_tokenizer(inner, 5).to(torch.bfloat16).save_pretrained(inner)
        options = {"subfolder": "inner", "config": config(), "dtype": torch.float32}
        pruner = NeuronALPruner.from_pretrained(tmp_path / "repo", **options)
        assert pruner.tokenizer.get_vocab()["w7"] == 12
        with pytest.raises(FileExistsError, match="which is read: choose a new directory"):
            pruner.quantize(inner, dataset=ids, overwrite=True)
        pruner.quantize(tmp_path / "sparse", dataset=ids)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", dtype="auto").dtype == torch.bfloat16
        asked = {}
        monkeypatch.setattr(pruner_module, "find_tokenizer", lambda source: asked.update(source.options))
        options = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True, "revision": "main"}
        NeuronALPruner.from_pretrained(tmp_path / "0", config=config(), dtype="float32", **options)
        assert asked == {**options, "dtype": "float32"}


def _push(rank, count, ids, folder):
    pruner, model = NeuronALPruner(config()), make_model("llama")
    pruner.prune(model, ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruner_module, "push_pruned", lambda *_, **__: (folder / f"{rank}").touch() or "https://commit")
        assert pruner.push_to_hub(model, "me/model") == "https://commit"


def test_the_first_of_several_processes_uploads(tmp_path, ids):
    (tmp_path / "pushed").mkdir()
    in_processes(2, _push, tmp_path, ids, tmp_path / "pushed")
    assert [path.name for path in (tmp_path / "pushed").iterdir()] == ["0"]


def test_only_the_last_pruned_model_is_saved(tmp_path, ids):
    """The report and the model card are those of the model that is saved."""
    pruner, first, second = NeuronALPruner(config()), make_model("llama"), make_model("llama", seed=1)
    with pytest.raises(ValueError, match="pruned nothing yet"):
        pruner.save(first, tmp_path)
    pruner.prune(first, ids)
    pruner.prune(second, ids.flip(0))
    alike = copy.deepcopy(second)  # another checkpoint with an equal record
    alike.config.name_or_path = "another"
    for other in (first, alike):
        with pytest.raises(ValueError, match="not the one that this pruner pruned last"):
            pruner.save(other, tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
    for model in (second, copy.deepcopy(second)):
        pruner.save(model, tmp_path / "saved", overwrite=True)
        saved = json.loads((tmp_path / "saved" / "neuronal_report.json").read_text())
        assert saved == json.loads(json.dumps(pruner.report.to_dict()))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_config_shared_by_two_models_is_not_written_to(family, ids):
    first = make_model(family)
    second = type(first)(first.config).eval()
    assert second.config is first.config
    expected = second(ids).logits
    NeuronALPruner(config()).prune(first, ids)
    assert first.config.sparsity_config["sparsity"] == 0.7 and not hasattr(second.config, "sparsity_config")
    assert all(module.config is first.config for module in first.modules() if hasattr(module, "config"))
    assert torch.equal(second(ids).logits, expected)
    NeuronALPruner(config()).prune(second, ids)


def test_a_sparse_model_is_not_pruned_again_silently(llama, ids):
    NeuronALPruner(config(0.5)).prune(llama, ids)
    with pytest.raises(ValueError, match="already sparse: its config has a sparsity_config. Prune the dense model"):
        NeuronALPruner(config()).prune(llama, ids)
    llama.config.sparsity_config = {"format": "dense"}  # of another tool
    with pytest.raises(ValueError, match="sparse: 50.00% of the weights of its projections are zero. Prune the dense"):
        NeuronALPruner(config()).prune(llama, ids)


def test_modes_and_gradients_are_left_alone(llama, ids):
    llama.to(torch.bfloat16).train()
    pruner = NeuronALPruner(config(**NEURONAL))
    pruner.prune(llama, ids)
    assert llama.training and pruner.report.achieved_sparsity == pytest.approx(0.7, abs=1e-3)
    weight = llama.model.layers[0].mlp.up_proj.weight
    assert weight.requires_grad and weight.grad is None and weight.dtype == torch.bfloat16
    llama(ids, labels=ids).loss.backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "No calibration data"),
        ("ids+1000", "Token ids range from"),
        ("long", "allows 2 to 64 tokens"),
        (["some text"], "needs a tokenizer: pass NeuronALPruner"),
    ],
)
def test_bad_input_raises_before_work_and_changes_nothing(llama, ids, dataset, message):
    data = {"ids+1000": ids + 1000, "long": ids.repeat(1, 5)}.get(str(dataset), dataset)
    before = state(llama)
    with pytest.raises(ValueError, match=message):
        NeuronALPruner(config(dataset=None)).prune(llama, data)
    assert same_state(llama, before) and not hasattr(llama.config, "sparsity_config")


@pytest.mark.parametrize("step", ["make_report", "make_sparsity_config"])
def test_a_prune_that_fails_at_its_end_changes_nothing(llama, ids, step, monkeypatch):
    monkeypatch.setattr(prune_module, step, lambda *_args: 1 / 0)
    before, pruner = state(llama), NeuronALPruner(config())
    with pytest.raises(ZeroDivisionError):
        pruner.prune(llama, ids)
    assert same_state(llama, before)
    assert pruner.report is None and not hasattr(llama.config, "sparsity_config")


def test_ctrl_c_while_weights_change_waits_for_them(llama, ids, monkeypatch):
    apply_changes = prune_module.apply_changes

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        apply_changes(*args)

    monkeypatch.setattr(prune_module, "apply_changes", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        NeuronALPruner(config()).prune(llama, ids)
    assert signal.getsignal(signal.SIGINT) is handler
    for projection in find_decoder(llama).projections.values():
        assert (projection.weight == 0).float().mean() == pytest.approx(0.7, abs=1e-2)
    assert llama.config.sparsity_config["sparsity"] == 0.7


def test_windows_of_a_gemma_begin_with_bos(tmp_path):
    """In calibration, refit and test windows; report, card and config say so. `add_bos=False` leaves it out."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * i) % 60}" for i in range(900)))
    sizes = {"num_samples": 8, "num_alignment_samples": 2, "seq_length": 16, "dataset": str(text)}
    seen = {None: set(), False: set()}
    for add_bos, first in seen.items():

        def watch(module, args, kwargs, first=first):
            first.update(kwargs["input_ids"][:, 0].tolist())

        pruner = NeuronALPruner(NeuronALConfig(0.5, add_bos=add_bos, **sizes), make_tokenizer(bos_token="w9"))
        pruner.model = make_model("gemma")
        handle = pruner.model.register_forward_pre_hook(watch, with_kwargs=True)
        pruner.quantize(tmp_path / f"{add_bos}", evaluate=[text], window=16)
        handle.remove()
        assert pruner.report.calibration["add_bos"] == pruner.report.evaluation["text.txt"]["bos"] == (add_bos is None)
        card = (tmp_path / f"{add_bos}" / "README.md").read_text()
        assert ("each begins with BOS" in card) == ("16 tokens (BOS first)" in card) == (add_bos is None)
    assert seen[None] == {9} and len(seen[False]) > 1
