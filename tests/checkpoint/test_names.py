from optimum_neuronal.checkpoint import names


def test_files_of_weights():
    ours = (
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "model.safetensors.index.json",
        "packed-00001-of-00001.safetensors",
        "packed-100000-of-100000.safetensors",
        "packed.safetensors.index.json",
    )
    others = ("adapter_model.safetensors", "model-of-mine.safetensors", "consolidated.safetensors", "config.json")
    assert all(map(names.is_of_weights, ours)) and not any(map(names.is_of_weights, others))


def test_names_as_transformers_and_the_format_have_them():
    assert names.shard(names.DENSE, 1, 2) == "model-00001-of-00002.safetensors"
    assert names.shard(names.PACKED, 12, 12) == "packed-00012-of-00012.safetensors"
    assert (names.DENSE_FILE, names.DENSE_INDEX) == ("model.safetensors", "model.safetensors.index.json")
    assert names.PACKED_INDEX == "packed.safetensors.index.json"
    assert names.is_of_weights(names.shard(names.PACKED, 1, 99_999))
    for name, admitted in (("weights_1.safetensors", True), ("../a.safetensors", False), (".a.safetensors", False)):
        assert bool(names.LISTED_FILE.fullmatch(name)) == admitted
