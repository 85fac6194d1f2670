import json
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import constants
from sparse_checkpoints import save_pruned
from transformers import AutoTokenizer

from optimum_neuronal import NeuronALConfig, NeuronALPruner
from optimum_neuronal.common import connection
from optimum_neuronal.data.conversations import find_template
from optimum_neuronal.model import sources
from optimum_neuronal.model.load_model import load_model
from optimum_neuronal.model.origin import find_tokenizer
from optimum_neuronal.model.sources import locate
from optimum_neuronal.pruning.dry_run import dry_run


CONFIG = NeuronALConfig(0.5, saliency="magnitude", topup="uniform")
COUNTS = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "head_count": 2}


@pytest.fixture
def gguf_file(tmp_path):
    """A Llama model of two blocks and 48 tokens, with weights of 8 bits."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "tiny" / "tiny.Q8_0.gguf"
    file.parent.mkdir()
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in COUNTS.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(48)
    shapes = {"token_embd": (48, 32), "output": (48, 32), "output_norm": (32,)}
    for block in range(2):
        shapes |= {f"blk.{block}.{name}_norm": (32,) for name in ("attn", "ffn")}
        shapes |= {f"blk.{block}.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{block}.ffn_{name}": (64, 32) for name in ("gate", "up")} | {
            f"blk.{block}.ffn_down": (32, 64)
        }
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).numpy()
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_is_pruned_and_report_and_card_say_what_it_was(gguf_file, tmp_path):
    assert "2 blocks" in str(dry_run(gguf_file, CONFIG))
    for path in (gguf_file, gguf_file.parent):
        pruner = NeuronALPruner.from_pretrained(path, config=CONFIG)
        pruner.quantize(tmp_path / "sparse", overwrite=True)
        assert "tiny.Q8_0.gguf, whose weights had been quantized before" in str(pruner.report)
        card = (tmp_path / "sparse" / "README.md").read_text()
        assert "tiny.Q8_0.gguf, whose weights had been quantized before" in card
        assert "--model path/to/tiny.Q8_0.gguf" in card
    found, dense = load_model(tmp_path / "sparse"), load_model(gguf_file)
    assert not hasattr(found, "gguf_file") and type(found) is type(dense)
    pairs = zip(found.parameters(), dense.parameters())
    assert all(torch.equal(sparse[sparse != 0], own[sparse != 0]) for sparse, own in pairs)


def test_what_a_directory_names(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(sources, "find_spec", lambda name: name)
    assert locate(tmp_path, {"revision": "main"}) == (tmp_path, {"revision": "main", "gguf_file": "a.gguf"})
    assert locate("owner/name", {}) == ("owner/name", {"local_files_only": True}), "in offline mode"
    source = locate(tmp_path, {"revision": "main"})
    with monkeypatch.context() as patch:
        patch.setattr(sources, "check_directory", lambda _: pytest.fail("checked again"))
        assert locate(source, {"dtype": "auto"}) == (tmp_path, {**source.options, "dtype": "auto"})
    for gone in ("./gone", "gone.gguf"):
        with pytest.raises(FileNotFoundError, match=f"{gone} does not exist: name the directory of a model"):
            locate(gone, {})
    (tmp_path / "of" / "sub").mkdir(parents=True)
    (tmp_path / "of" / "sub" / "config.json").touch()
    assert locate(tmp_path / "of", {"subfolder": "sub"}) == (tmp_path / "of" / "sub", {})
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"Reading a.gguf needs gguf: pip install 'optimum-neuronal\[gguf\]'"):
        locate(tmp_path / "a.gguf", {})
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match="holds 2 GGUF files: name one of them, such as .*a.gguf"):
        locate(tmp_path, {})
    monkeypatch.setattr(sources, "find_spec", lambda name: name)
    assert locate(tmp_path, {"gguf_file": "b.gguf"}) == (tmp_path, {"gguf_file": "b.gguf"})


def test_quantized_checkpoints_are_named_before_they_are_loaded(tmp_path):
    for method in ("gptq", "fp8", "bitsandbytes"):
        config = {"model_type": "llama", "quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        for use in (
            lambda path: NeuronALPruner.from_pretrained(path, config=CONFIG),
            lambda path: dry_run(path, CONFIG),
        ):
            with pytest.raises(ValueError, match=rf"is already quantized \({method}\): prune the original model"):
                use(tmp_path)


def test_a_packed_checkpoint_is_not_called_quantized(tmp_path):
    save_pruned(tmp_path / "packed", format="packed")
    pruner = NeuronALPruner.from_pretrained(tmp_path / "packed", config=CONFIG)
    with pytest.raises(ValueError, match="packed is already sparse: its weights are packed. Prune the dense model"):
        pruner.prune(pruner.model)


def test_without_a_connection_only_cached_files_are_asked_for(monkeypatch):
    """The Hub is asked once, whatever is read, and not for what lies here."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for endpoint, options in (("http://127.0.0.1:1", {"local_files_only": True}), ("http://127.0.0.1:2", {})):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        session = Mock(head=Mock(side_effect=connection.HTTPError("refused") if options else None))
        monkeypatch.setattr(connection, "get_session", lambda session=session: session)
        for name in ("me/llama", "me/other"):
            assert locate(name, {}) == (name, options)
        assert session.head.call_count == 1
        assert locate(__file__, {}).options == {}
        assert session.head.call_count == 1


def test_a_tokenizer_of_a_gguf_file_is_called_like_the_file(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.gguf").touch()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    with pytest.raises(ValueError, match="the tokenizer of a.gguf has no chat template"):
        find_template(find_tokenizer(tmp_path / "a.gguf"), "The dataset")
