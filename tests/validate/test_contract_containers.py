"""Containers: shards, index and strays. Each test breaks one sound export in one way."""

import json

import pytest


def test_sharded_export_with_a_true_index_passes(export):
    result = export("qwen3moe_nvfp4_kvfp8").write(shards=3).check("vllm", "sglang")
    assert result.errors == ()
    assert result.data["tensors"] == 74


def test_missing_shard_is_an_error_although_a_quantized_model_would_start(export, hits):
    """C89: a shard named in the index and deleted."""
    one = export("llama_nvfp4_kvfp8").write(shards=3)
    (one.folder / "model-00002-of-00003.safetensors").unlink()
    result = one.check()
    assert [finding.where for finding in hits(result, "shard-missing")] == ["model-00002-of-00003.safetensors"]
    assert "index-key-without-tensor" in hits(result)


def test_tensor_absent_from_the_index_is_an_error(export, hits):
    """C89: every key of a header stands in the index."""
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    index = one.read_index()
    del index["weight_map"]["lm_head.weight"]
    one.index(index)
    assert [finding.where for finding in hits(one.check(), "tensor-not-in-index")] == ["lm_head.weight"]


def test_index_of_the_source_does_not_pass_for_the_outputs(export, hits):
    """C88: three shards in the index, the tensors elsewhere."""
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    index = one.read_index()
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["lm_head.weight"] = next(f for f in files if f != index["weight_map"]["lm_head.weight"])
    one.index(index)
    assert [finding.where for finding in hits(one.check(), "index-wrong-shard")] == ["lm_head.weight"]


def test_total_size_counts_the_bytes_written(export, hits):
    """C95: total_size of the source reused."""
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    index = one.read_index()
    true_size = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = true_size + 1
    one.index(index)
    result = one.check()
    assert result.data["bytes"] == true_size
    assert str(true_size) in hits(result, "index-total-size")[0].message


def test_several_shards_need_an_index(export, hits):
    one = export("llama_nvfp4_kvfp8").write(shards=2, index=False)
    assert hits(one.check()) == {"index-missing"}


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/model.safetensors"])
def test_index_cannot_point_outside_the_folder(export, hits, file):
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    index = one.read_index()
    index["weight_map"]["lm_head.weight"] = file
    one.index(index)
    assert [finding.severity for finding in hits(one.check(), "index-path-escapes")] == ["error"]


@pytest.mark.parametrize("weight_map", [None, ["lm_head.weight"]])
def test_index_without_a_map_is_named(export, hits, weight_map):
    one = export("llama_nvfp4_kvfp8").write()
    one.index({"metadata": {}, "weight_map": weight_map})
    assert "index-malformed" in hits(one.check())


def test_index_entry_without_a_file_name_is_named(export, hits):
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    index = one.read_index()
    index["weight_map"]["lm_head.weight"] = 1
    one.index(index)
    assert hits(one.check(), "index-malformed")[0].message == "lm_head.weight has no file name"


def test_folder_named_like_a_shard_is_no_shard(export):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "old.safetensors").mkdir()
    assert one.check().errors == ()


def test_second_copy_of_the_weights_is_an_error(export, hits):
    """C98: consolidated.safetensors beside the shards is read by loaders that glob."""
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    (one.folder / "consolidated.safetensors").write_bytes(
        (one.folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    assert [f.where for f in hits(one.check(), "stray-weight-file", "error")] == ["consolidated.safetensors"]


def test_pickle_beside_the_shards_is_a_warning(export, hits):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert [f.where for f in hits(one.check(), "stray-weight-file", "warning")] == ["pytorch_model.bin"]


def test_stale_shard_of_an_earlier_export_is_an_error(export, hits):
    """C93: three shards written before, two now."""
    one = export("llama_nvfp4_kvfp8").write(shards=2)
    (one.folder / "model-00003-of-00003.safetensors").write_bytes(
        (one.folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    assert "stray-weight-file" in hits(one.check())


def test_same_tensor_in_two_shards_is_an_error(export, hits):
    from safetensors.torch import load_file, save_file

    one = export("llama_nvfp4_kvfp8").write(shards=2)
    first, second = sorted(one.folder.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, metadata={"format": "pt"})
    assert [finding.where for finding in hits(one.check(), "duplicate-tensor")] == [name]


def test_truncated_shard_is_named(export, hits):
    """C90: 100 bytes cut off; a memory map would read zeros there."""
    one = export("llama_nvfp4_kvfp8").write()
    file = one.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    result = one.check()
    assert hits(result, "shard-unreadable")[0].where == "model.safetensors"
    assert "no-tensors" in hits(result)


def test_lfs_pointer_is_called_one(export, hits):
    """C91: a pointer file instead of the shard."""
    one = export("llama_nvfp4_kvfp8").write()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (one.folder / "model.safetensors").write_text(pointer)
    finding = hits(one.check(), "shard-unreadable")[0]
    assert "LFS pointer" in finding.message
    assert finding.hint == "run `git lfs pull`"


def test_second_file_that_sglang_globs_is_an_error(export, hits):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "old_hf_quant_config.json").write_text("{}")
    assert [finding.where for finding in hits(one.check(), "second-hf-quant-config")] == ["old_hf_quant_config.json"]


def test_shard_without_format_metadata_is_a_warning(export, hits):
    one = export("llama_nvfp4_kvfp8").write(metadata={"by": "hand"})
    result = one.check("vllm")
    assert result.errors == ()
    assert [f.where for f in hits(result, "shard-format-metadata", "warning")] == ["model.safetensors"]


@pytest.mark.parametrize("lock", [{"complete": False}, {}])
def test_unfinished_run_is_refused(export, hits, lock):
    """C112: the lock says that the run has not finished."""
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "requant.lock.json").write_text(json.dumps(lock))
    assert hits(one.check()) == {"output-incomplete"}


def test_finished_run_passes(export):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "requant.lock.json").write_text('{"complete": true}')
    assert one.check().errors == ()


def test_partial_folder_is_refused(export, hits):
    """C112: the folder's own name says so."""
    one = export("llama_nvfp4_kvfp8")
    one.folder = one.folder.with_name("output.partial")
    assert hits(one.check()) == {"output-incomplete"}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_unreadable_config_is_named(export, hits, text):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "config.json").write_text(text)
    assert hits(one.check(), "json-unreadable")[0].where == "config.json"


def test_absent_config_is_named(export, hits):
    one = export("llama_nvfp4_kvfp8").write()
    (one.folder / "config.json").unlink()
    assert "config-missing" in hits(one.check())


def test_a_rule_with_many_hits_gives_ten_examples_and_the_count(export, hits):
    one = export("llama_nvfp4_kvfp8")
    number = one.drop(".weight_scale_2")
    result = one.check()
    found = hits(result, "global-scale-missing")
    assert len(found) == 11
    assert found[-1].message == f"{number - 10} more of the same ({number} in all)"
    assert result.data["rules"]["global-scale-missing"] == number
