import json
import re
import sys
from pathlib import Path

import datasets
import pytest
import torch
from conftest import make_model, make_tokenizer
from obstacles import OBSTACLES, state
from several_processes import in_processes
from sparse import same_zeros, zeros_of
from transformers import AutoModelForCausalLM, AutoTokenizer
from trial_helpers import same_state

from optimum_neuronal import (
    FinetuneConfig,
    NeuronALConfig,
    NeuronALPruner,
    convert_checkpoint,
    evaluate_perplexity,
    finetune,
    inspect_checkpoint,
)
from optimum_neuronal.checkpoint import saving
from optimum_neuronal.training import checkpoints, finetune_setup
from optimum_neuronal.training import finetune as module


SMALL = {"steps": 10, "seq_length": 16, "batch_size": 4, "learning_rate": 5e-3, "bf16": False}
TEXT = " ".join(f"w{(7 * i) % 60}" for i in range(3000))


@pytest.fixture
def folders(tmp_path):
    """A dense model and a sparse one, with tokenizer and report, and a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    make_model("llama", vocab_size=256).save_pretrained(tmp_path / "dense")
    make_tokenizer().save_pretrained(tmp_path / "dense")
    config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
    NeuronALPruner.from_pretrained(tmp_path / "dense", config=config).quantize(tmp_path / "sparse")
    return tmp_path


def tuned(folders, model="sparse", output="tuned", **given):
    fields = {name: given.pop(name) for name in list(given) if name in FinetuneConfig.__dataclass_fields__}
    config = FinetuneConfig(**{**SMALL, "dataset": str(folders / "text.txt"), **fields})
    given |= {"dataset": given.pop("texts")} if "texts" in given else {}
    given = {"teacher": folders / "dense", "evaluate": {"test": [TEXT[:2000]]}, "window": 16, **given}
    return finetune(folders / model, folders / output, config, **given)


def perplexity(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return evaluate_perplexity(AutoModelForCausalLM.from_pretrained(folder), tokenizer, [TEXT[:2000]], 16)


class TestResult:
    def test_the_result_reloads_with_every_zero_and_what_was_measured(self, folders):
        model, report = tuned(folders)
        zeros = zeros_of(AutoModelForCausalLM.from_pretrained(folders / "sparse"))
        saved = AutoModelForCausalLM.from_pretrained(folders / "tuned")
        assert same_zeros(saved, zeros) and same_zeros(model, zeros) and not model.training
        assert inspect_checkpoint(folders / "tuned").verdict.startswith("Verified")
        measured = report.training[0]["evaluation"]["test"]
        assert measured["before"] == pytest.approx(perplexity(folders / "sparse"), rel=1e-4)
        assert measured["after"] == pytest.approx(perplexity(folders / "tuned"), rel=1e-4)
        assert measured["after"] < 0.95 * measured["before"]
        assert not list(folders.glob(".*")), "no checkpoints stay"

    @pytest.mark.parametrize("kind", OBSTACLES)
    def test_what_appears_at_the_output_meanwhile_stays(self, kind, folders, monkeypatch):
        def appears(*given, write=saving.write_model):
            write(*given)
            OBSTACLES[kind](folders / "tuned")
            before.extend(state(folders / "tuned"))

        before = []
        monkeypatch.setattr(saving, "write_model", appears)
        with pytest.raises(FileExistsError, match="tuned was not written.*The complete result is in"):
            tuned(folders, steps=1, overwrite=True)
        assert state(folders / "tuned") == before

    def test_report_and_card_say_both(self, folders):
        _, report = tuned(folders, answers=["w1 w2 w3", "w4", "w5"], add_bos=False)
        saved = json.loads((folders / "tuned" / "neuronal_report.json").read_text())
        assert saved == json.loads(json.dumps(report.to_dict())) and saved["method"] == "magnitude + uniform"
        (entry,) = saved["training"]
        found = [entry[name] for name in ("steps", "tokens", "source", "teacher")]
        assert found == [10, 640, "text.txt", "dense"] and entry["held_out"]["after"] < entry["held_out"]["before"]
        assert entry["config"]["dataset"] == ["text.txt"], "without folders"
        assert not entry["resumed"] and "since it was resumed" not in repr(report)
        assert "fine-tuned" in repr(report) and f"{entry['evaluation']['test']['after']:.2f} (after)" in repr(report)
        card = (folders / "tuned" / "README.md").read_text()
        before, after = (entry["answers"][when] for when in ("before", "after"))
        assert after["kl"] < before["kl"] and f"KL divergence {after['kl']:.3f}" in card and "(after)" in repr(report)
        assert before["examples"][0]["dense"] == after["examples"][0]["dense"]
        rows = ["| " + " | ".join(one.values()) for one in after["examples"]]
        assert len(rows) == 3 and all(row in re.sub(" +", " ", card) for row in rows)
        assert f"{entry['held_out']['after']:.2f} (after)" in repr(report)
        assert "(magnitude + uniform) and then fine-tuned." in card and "without retraining" not in card
        assert "640 tokens of text.txt, teacher dense, all weights but embeddings, learning rate 0.005" in card
        assert "finetune --model tuned-step-1 --teacher path/to/dense --dataset path/to/text.txt" in card
        assert " --no-add-bos " in card

    def test_answers_need_a_teacher(self, folders):
        with pytest.raises(ValueError, match="need a teacher, and there is none"):
            tuned(folders, kl_weight=0.0, answers=True)

    def test_text_in_memory(self, folders):
        """The card does not name the config's dataset, which was not read."""
        _, report = tuned(folders, dataset="c4", steps=2, texts=[TEXT])
        (entry,) = report.training
        assert entry["source"] == "a list of 1 strings" and entry["config"]["dataset"] is None
        card = (folders / "tuned" / "README.md").read_text()
        assert "finetune --model tuned-step-1 --teacher path/to/dense --dataset path/to/text.txt" in card

    def test_a_second_fine_tune_stands_behind_the_first(self, folders):
        tuned(folders)
        _, report = tuned(folders, "tuned", "again", steps=2, kl_weight=0.0)
        assert [entry["steps"] for entry in report.training] == [10, 2]
        assert [entry["teacher"] for entry in report.training] == ["dense", None]
        assert "these commands, one after the other," in (folders / "again" / "README.md").read_text()

    def test_the_best_of_all_evaluations_is_kept(self, folders, capfd):
        """Not the last one, which a large learning rate spoils."""
        _, report = tuned(folders, learning_rate=0.05, steps=5)
        shown = re.findall(r"step (\d) of 5: perplexity ([\d.]+)", capfd.readouterr().err)
        best, (entry,) = min(shown, key=lambda one: float(one[1])), report.training
        assert len(shown) == 6 and entry["best_step"] == int(best[0]) not in (0, 5)
        assert f"{entry['held_out']['after']:.2f}" == best[1] and f"{entry['held_out']['before']:.2f}" == shown[0][1]

    def test_nothing_is_saved_that_measures_worse_than_before(self, folders, capfd):
        """And nothing stays, so that another learning rate can be tried."""
        with pytest.raises(ValueError, match="not improve the perplexity on held-out text, .*so nothing was saved"):
            tuned(folders, learning_rate=1e30)
        assert "step 10 of 10: perplexity nan on held-out text" in capfd.readouterr().err
        assert not (folders / "tuned").exists() and not list(folders.glob(".*"))

    @pytest.mark.parametrize("lora, rate", [(None, 0.29), (4, 1.16)])
    def test_the_learning_rate_follows_from_the_width_and_embeddings_are_frozen(self, lora, rate, folders):
        model, report = tuned(folders, learning_rate=None, lora=lora, steps=2)
        assert report.training[0]["learning_rate"] == rate / model.config.hidden_size
        before = AutoModelForCausalLM.from_pretrained(folders / "sparse")
        assert torch.equal(model.get_input_embeddings().weight, before.get_input_embeddings().weight)
        assert torch.equal(model.lm_head.weight, before.lm_head.weight) == (lora is not None)
        assert all(weight.requires_grad for weight in model.parameters())

    def test_lora_is_merged(self, folders):
        """The caller's random state does not matter and stays, and all weights can be trained further."""
        before = torch.get_rng_state()
        model, report = tuned(folders, lora=4, learning_rate=2e-2)
        assert torch.equal(torch.get_rng_state(), before)
        measured = report.training[0]["evaluation"]["test"]
        assert measured["after"] < 0.95 * measured["before"] and "LoRA of rank 4" in repr(report)
        assert not any("lora" in name for name, _ in model.named_parameters())
        assert all(weight.requires_grad for weight in model.parameters())
        assert perplexity(folders / "tuned") == pytest.approx(measured["after"], rel=1e-4)
        torch.rand(1)
        second, _ = tuned(folders, output="again", lora=4, learning_rate=2e-2)
        assert same_state(second, model.state_dict())

    def test_other_gpus_do_not_enlarge_the_batch(self, folders, monkeypatch):
        """Trainer would give each of those that one process sees a batch."""
        two = property(lambda self: vars(self).get("_n_gpu") or 2)
        monkeypatch.setattr(finetune_setup.TrainingArguments, "n_gpu", two)
        monkeypatch.setattr(module, "_train", lambda setup: sizes.append(setup.arguments.train_batch_size))
        sizes = []
        with pytest.raises(TypeError):  # nothing was trained
            tuned(folders, steps=2)
        assert sizes == [4]

    @pytest.mark.parametrize("family", ["mixtral", "llama4_text", "deepseek_v3"])
    def test_lora_leaves_experts_and_routers_as_they_are(self, family, folders, caplog):
        make_model(family, vocab_size=256).save_pretrained(folders / "moe")
        make_tokenizer().save_pretrained(folders / "moe")
        config = NeuronALConfig(0.7, saliency="magnitude", topup="uniform")
        NeuronALPruner.from_pretrained(folders / "moe", config=config).quantize(folders / "sparse moe")
        model, _ = tuned(folders, "sparse moe", kl_weight=0.0, lora=2, steps=2)
        before = AutoModelForCausalLM.from_pretrained(folders / "sparse moe").state_dict()
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
        others = [name.replace("shared_experts.", "") for name in changed]
        assert any("o_proj" in name for name in others)
        assert not any(part in name for name in others for part in ("experts.", "router", "gate."))
        assert "LoRA trains linear layers only" in caplog.text

    def test_a_packed_model_is_unpacked_and_packed_again(self, folders):
        convert_checkpoint(folders / "sparse", "packed", folders / "packed")
        _, first = tuned(folders, steps=3)
        _, second = tuned(folders, "packed", "again", steps=3, format="packed")
        assert first.training[0]["evaluation"] == second.training[0]["evaluation"]
        assert list((folders / "again").glob("packed-*.safetensors"))

    def test_gradient_checkpointing_and_micro_batches_change_nothing(self, folders):
        first, _ = tuned(folders, steps=3)
        second, _ = tuned(folders, output="again", steps=3, gradient_checkpointing=True, micro_batch=2)
        theirs = second.state_dict()
        assert all(torch.allclose(value, theirs[name], atol=1e-4) for name, value in first.state_dict().items())

    def test_a_teacher_with_some_zeros_and_matrices_of_unknown_names(self, folders, monkeypatch):
        """It was quantized once, and pruning ignored the matrices."""
        load = finetune_setup.load_model

        def changed(name, **options):
            model = load(name, **options)
            for layer in model.model.layers:
                layer.mlp.other = torch.nn.Linear(32, 4)
                layer.mlp.up_proj.weight.data[:, ::6] *= float(name != folders / "dense")
            return model

        monkeypatch.setattr(finetune_setup, "load_model", changed)
        assert tuned(folders, steps=1)[1].training[0]["teacher"] == "dense"

    def test_without_a_report(self, folders, caplog, capsys):
        (folders / "sparse" / "neuronal_report.json").unlink()
        _, report = tuned(folders, steps=1, answers=["w1"])
        assert not (folders / "tuned" / "neuronal_report.json").exists()
        assert report is None and "has no neuronal_report.json" in caplog.text
        told = capsys.readouterr().err
        assert re.search(r"perplexity, test: [\d.]+ \(before\), [\d.]+ \(after\)", told)
        assert re.search(r"dense model's answers: KL divergence [\d.]+, same token [\d.]+% \(after\)", told)
        assert (folders / "tuned" / "tokenizer.json").exists() and perplexity(folders / "tuned") > 1

    def test_conversations(self, folders):
        template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        for folder in ("dense", "sparse"):
            make_tokenizer(chat_template=template).save_pretrained(folders / folder)
        messages = [{"role": "w1", "content": " ".join(f"w{i % 60}" for i in range(200))}]
        (folders / "chat.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for _ in range(8)))
        _, report = tuned(folders, dataset=str(folders / "chat.jsonl"), evaluate=())
        assert report.training[0]["source"] == "chat.jsonl"
        both = [f"{folders / 'text.txt'}:0.75", f"{folders / 'chat.jsonl'}:0.25"]
        _, report = tuned(folders, dataset=both, evaluate=(), overwrite=True)
        assert report.training[0]["dataset_tokens"] == {"text.txt (75%)": 480, "chat.jsonl (25%)": 160}
        card = (folders / "tuned" / "README.md").read_text()
        assert "--dataset path/to/text.txt:0.75 path/to/chat.jsonl:0.25" in card


class TestAmount:
    @pytest.mark.parametrize("amount, steps", [({"tokens": 130}, 3), ({"minutes": 0.1}, 12)])
    def test_tokens_and_minutes(self, amount, steps, folders, monkeypatch):
        """A step of half a second fits 12 times into 6 seconds."""
        seen = []
        timed = lambda student, *_: seen.append(student.is_gradient_checkpointing) or 0.5  # noqa: E731
        monkeypatch.setattr(finetune_setup, "seconds_of_pass", timed)
        model, report = tuned(folders, steps=None, gradient_checkpointing=True, **amount)
        assert seen == [True] * ("minutes" in amount) and not model.is_gradient_checkpointing, "timed as trained"
        assert (report.training[0]["steps"], report.training[0]["tokens"]) == (steps, 64 * steps)

    def test_timing_changes_no_weight(self, folders):
        student = AutoModelForCausalLM.from_pretrained(folders / "sparse")
        before = {name: value.clone() for name, value in student.state_dict().items()}
        seconds = finetune_setup.seconds_of_pass(student, None, FinetuneConfig(seq_length=16), 2)
        assert seconds > 0 and all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
        assert all(parameter.grad is None for parameter in student.parameters())

    def test_one_amount(self):
        with pytest.raises(ValueError, match="steps and minutes are given: expected one of steps, tokens, minutes"):
            FinetuneConfig(steps=3, minutes=2)
        assert FinetuneConfig(dataset=Path("a.txt")).dataset == ("a.txt",)


class TestResuming:
    @pytest.mark.parametrize(
        "owner, name, call, damaged, step",
        [
            (module.SparseTrainer, "training_step", 8, None, 6),
            (module.SparseTrainer, "training_step", 8, "checkpoint-6/optimizer.pt", 0),
            (checkpoints, "write_atomically", 3, None, 4),  # the marker of step 6
            (checkpoints.shutil, "rmtree", 3, "checkpoint-4/scheduler.pt", 6),  # of the checkpoint of step 4
            (module, "save_pruned", 1, None, 10),
        ],
    )
    @pytest.mark.parametrize("how", [{}, {"lora": 4}], ids=["all weights", "LoRA"])
    def test_it_goes_on_from_its_last_checkpoint(
        self, how, owner, name, call, damaged, step, folders, monkeypatch, capfd, caplog
    ):
        """Wherever it is killed, the result is that of a run without a kill, bit for bit, and nothing is measured twice."""
        own, calls, work = getattr(owner, name), iter(range(1, call)), folders / ".tuned.unfinished"

        def killed(*args, **kwargs):
            if not next(calls, None):
                raise KeyboardInterrupt
            return own(*args, **kwargs)

        whole, _ = tuned(folders, output="whole", **how)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, killed)
            tuned(folders, **how)
        (work / "checkpoints" / "checkpoint-x").mkdir()
        if damaged is not None:
            (work / "checkpoints" / damaged).write_bytes(b"cut")
        resumed, report = tuned(folders, **how)
        assert "checkpoint-x is incomplete or damaged: it is skipped" in caplog.text
        assert damaged is None or f"{damaged.partition('/')[0]} is incomplete or damaged" in caplog.text
        assert report.training[0]["resumed"] == (step > 0) == ("since it was resumed" in repr(report))
        shown = capfd.readouterr().err.split("toward dense")[-1]
        assert shown.startswith(f", from step {step} on" if step else "\nstep 0 of 10: perplexity")
        assert re.findall(r"step (\d+) of 10", shown) == [str(done) for done in range(step + 2 * (step > 0), 11, 2)]
        assert same_state(whole, resumed.state_dict()) and not work.exists()

    def test_other_settings_are_refused(self, folders, monkeypatch):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(module.SparseTrainer, "training_step", lambda *_, **__: 1 / 0)
            tuned(folders)
        with pytest.raises(ValueError, match="different settings: learning_rate was 0.005, is 0.001"):
            tuned(folders, learning_rate=1e-3)
        make_model("llama", seed=1, vocab_size=256).save_pretrained(folders / "other")
        with pytest.raises(ValueError, match="different settings: teacher was "):
            tuned(folders, teacher=folders / "other")
        (folders / "text.txt").write_text(TEXT[::-1])
        with pytest.raises(ValueError, match="different settings: training data was "):
            tuned(folders)


class TestRefused:
    """Before any training, and nothing is written."""

    @pytest.fixture(autouse=True)
    def untrained(self, monkeypatch, folders):
        monkeypatch.setattr(module, "_train", lambda _: pytest.fail("it was trained"))
        yield
        assert not (folders / "tuned").exists() and not list(folders.glob(".*"))

    @pytest.mark.parametrize(
        "given, message",
        [
            ({"model": "dense"}, "The model is dense"),
            ({"teacher": "sparse"}, "70% of the weights of the teacher .*sparse are zero: expected the dense"),
            ({"teacher": None}, "`base_model` is missing from `sparsity_config`: pass the dense .*--teacher"),
            ({"teacher": "small"}, "The teacher predicts 64 tokens and the sparse model 256"),
            ({"teacher": "nan"}, "The teacher cannot be measured on held-out text: The loss is nan"),
            ({"model": "inf"}, "The sparse model cannot be measured on held-out text: The loss is nan"),
            ({"texts": ["w1 w2"]}, "holds 2 tokens: expected at least two sequences of 16"),
            ({"seq_length": 65}, "Sequences of 65 tokens do not fit"),
            ({"micro_batch": 3}, "batch_size is 4: expected a multiple of 3, a micro-batch"),
        ],
    )
    def test_what_does_not_fit(self, given, message, folders):
        make_model("llama").save_pretrained(folders / "small")
        for name, source, value in (("nan", "dense", torch.nan), ("inf", "sparse", torch.inf)):
            model = AutoModelForCausalLM.from_pretrained(folders / source)
            model.model.norm.weight.data[0] = value
            model.save_pretrained(folders / name)
            make_tokenizer().save_pretrained(folders / name)
        teacher = given.get("teacher", "dense")
        with pytest.raises(ValueError, match=message):
            tuned(folders, **{**given, "teacher": teacher and folders / teacher})

    def test_text_that_the_tokenizer_cannot_render_before_a_model_is_loaded(self, folders, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folders / "cache")
        monkeypatch.setattr(module, "load_student", lambda *_: pytest.fail("a model was loaded"))
        (folders / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}')
        with pytest.raises(ValueError, match=r"chat.jsonl\) holds .* the tokenizer of sparse has no chat template"):
            tuned(folders, dataset=str(folders / "chat.jsonl"))

    def test_another_tokenizer_or_none(self, folders):
        make_tokenizer(eos_token="</s>").save_pretrained(folders / "dense")
        with pytest.raises(ValueError, match="The tokenizers of the teacher .*dense and the sparse model differ"):
            tuned(folders)
        for file in (folders / "sparse").glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ValueError, match="No tokenizer can be loaded from .*sparse, and training needs one"):
            tuned(folders)

    def test_missing_packages(self, folders, monkeypatch):
        for package, extra, given in (("peft", "peft", {"lora": 2}), ("accelerate", "train", {})):
            monkeypatch.setitem(sys.modules, package, None)
            with pytest.raises(ImportError, match=rf"{package} is missing: pip install .*\[{extra}\]"):
                tuned(folders, **given)

    def test_the_sparse_model_itself_or_its_teacher_as_output(self, folders, monkeypatch):
        for output in ("sparse", "dense"):
            with pytest.raises(FileExistsError, match="which is read: choose a new directory"):
                tuned(folders, output=output, overwrite=True)
        monkeypatch.chdir(folders)  # where the name in the sparse model's config is a path
        config = json.loads((folders / "sparse" / "config.json").read_text())
        config["sparsity_config"]["base_model"] = "dense"
        (folders / "sparse" / "config.json").write_text(json.dumps(config))
        with pytest.raises(FileExistsError, match="which is read: choose a new directory"):
            tuned(folders, output="dense", overwrite=True, teacher=None)


def _in_two(rank, count, folders):
    tuned(folders, output="two")


def test_two_processes_share_each_step(folders):
    """The result is that of one process, up to rounding."""
    whole, _ = tuned(folders, output="one")
    in_processes(2, _in_two, folders, folders)
    two = AutoModelForCausalLM.from_pretrained(folders / "two").state_dict()
    assert all(torch.allclose(value, two[name], atol=1e-3) for name, value in whole.state_dict().items())
    (entry,) = json.loads((folders / "two" / "neuronal_report.json").read_text())["training"]
    assert (entry["processes"], entry["tokens"]) == (2, 640)
