"""The quick way through a header agrees with the slow one, or stands aside: it never accepts what JSON would not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requant.convert import shards
from requant.convert.canonical import columns_of, index_of
from requant.convert.shards import nbytes_of, read_shard_header, render_header
from requant.manifests.errors import SourceError

ENTRIES = [("a.weight", "BF16", (2, 3), 0, 12), ("b", "U8", (), 12, 13), ("ü.scale", "F32", (0,), 13, 13)]


def raw_of(entries, metadata=None):
    return render_header(entries, metadata or {})[8:]


def write(path, raw, data):
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data))
    return path


def test_what_the_library_writes_is_taken_apart_column_by_column():
    found = columns_of(raw_of(ENTRIES, {"format": "pt", "note": 'a "quoted" name, {braces}'}), 13, nbytes_of)
    assert found is not None
    assert found.names == ["a.weight", "b", "ü.scale"]
    assert found.dtypes == ["BF16", "U8", "F32"]
    assert found.shapes == [(2, 3), (), (0,)]
    assert found.begins == [0, 12, 13]
    assert found.sizes == [12, 1, 0]
    assert found.metadata == {"format": "pt", "note": 'a "quoted" name, {braces}'}


def test_a_shard_saved_by_the_library_goes_the_quick_way(tmp_path, monkeypatch):
    import numpy as np
    from safetensors import numpy

    tensors = {"w": np.ones((4, 2), np.float32), "n": np.arange(3, dtype=np.int8), "x.y": np.zeros((0, 5), np.uint8)}
    numpy.save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    slow = shards._check_entries
    monkeypatch.setattr(shards, "_check_entries", lambda *a: pytest.fail("the slow way"))
    quick = read_shard_header(tmp_path / "one.safetensors", "one")
    monkeypatch.setattr(shards, "_check_entries", slow)
    monkeypatch.setattr(shards, "columns_of", lambda *a: None)
    assert read_shard_header(tmp_path / "one.safetensors", "one") == quick
    assert {t.name: t.shape for t in quick.tensors} == {"w": (4, 2), "n": (3,), "x.y": (0, 5)}


GOOD = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"[0,2]", b"[0,3]"),
        (b"[2,3]", b"[1,2]"),
        (b"[2,3]", b"[2,4]"),
        (b"[0,2]", b"[00,2]"),
        (b"[0,2]", b"[-0,2]"),
        (b"[0,2]", b"[0, 2]"),
        (b"[0,2]", b"[0.0,2]"),
        (b"[0,2]", b"[0,2,2]"),
        (b"[0,2]", b"[+0,2]"),
        (b"[0,2]", b"[,2]"),
        (b"[0,2]", b"[0,]"),
        (b"[2,3]", b"[,3]"),
        (b"[2,3]", b"[2,]"),
        (b"[2,3]", b"[2," + b"9" * 36 + b"]"),
        (b'"shape":[2]', b'"shape":[' + b"9" * 5000 + b"]"),
        (b"[2,3]", b"[18446744073709551618,18446744073709551619]"),
        (b'"shape":[2]', b'"shape":[02]'),
        (b'"shape":[2]', b'"shape":[2,]'),
        (b'"shape":[2]', b'"shape":[-2]'),
        (b'"shape":[2]', b'"shape":[true]'),
        (b'"shape":[2]', b'"shape":[1e0]'),
        (b'"shape":[2]', b'"shape":["2"]'),
        (b'"dtype":"U8"', b'"dtype":"u8"'),
        (b'"dtype":"U8"', b'"dtype":"F9"'),
        (b'{"a"', b'{"b"'),
        (b'{"a"', b'{"\\u0061"'),
        (b'{"a"', b'{"a\n"'),
        (b'{"a"', b'{"\x00"'),
        (b'{"a"', b'{"a":1,"c"'),
        (b'{"a"', b'{"a"x'),
        (b'{"a"', b'{"\xff"'),
        (b'{"a"', b'{"__metadata__"'),
        (b'"a":{', b'"a": {'),
        (b"]},", b"]} ,"),
        (b"]}}", b"]}},"),
        (b"]}}", b'],"more":1}}'),
        (b'"data_offsets"', b'"data_offsets","x"'),
        (b'{"a"', b'{"__metadata__":{"a":},"a"'),
        (b'{"a"', b'{"__metadata__":[],"a"'),
        (b'{"a"', b'{"__metadata__":{"x":' + b"[" * 200_000 + b"]" * 200_000 + b'},"a"'),
        (GOOD, b"{}"),
        (GOOD, b""),
        (GOOD, b'{"__metadata__":{}}'),
    ],
)
def test_what_is_out_of_order_is_left_to_the_slow_way(before, after, tmp_path):
    assert columns_of(GOOD, 3, nbytes_of) is not None
    raw = GOOD.replace(before, after, 1)
    assert raw != GOOD
    assert columns_of(raw, 3, nbytes_of) is None


@given(st.data())
def test_one_changed_byte_never_changes_what_a_header_says(data):
    raw = raw_of(ENTRIES, {"format": "pt"})
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    found = columns_of(changed, 13, nbytes_of)
    if found is None:
        return
    plain = json.loads(changed)
    metadata = plain.pop("__metadata__", {})
    assert metadata == found.metadata
    assert list(plain) == found.names
    for name, dtype, shape, begin, size in zip(*found[1:], strict=True):
        assert plain[name] == {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}


def test_the_words_for_a_fault_are_the_slow_ways(tmp_path):
    raw = GOOD.replace(b"[2,3]", b"[1,2]")
    with pytest.raises(SourceError, match="overlaps the tensor before it"):
        read_shard_header(write(tmp_path / "bad.safetensors", raw, 3), "bad.safetensors")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b"[0,2]", b"[,2]", "header is not JSON"),
        (b'"shape":[2]', b'"shape":[' + b"9" * 5000 + b"]", "header is not JSON"),
        (b'{"a"', b'{"__metadata__":{"x":' + b"[" * 200_000 + b"]" * 200_000 + b'},"a"', "header is not JSON"),
    ],
)
def test_a_hostile_header_is_an_error_of_the_source_and_no_crash(before, after, said, tmp_path):
    raw = GOOD.replace(before, after, 1)
    with pytest.raises(SourceError, match=said):
        read_shard_header(write(tmp_path / "bad.safetensors", raw, 3), "bad.safetensors")


INDEX = {"metadata": {"total_size": 3}, "weight_map": {"a": "x.safetensors", "ü.b": "y.safetensors"}, "more": [1]}


@pytest.mark.parametrize("indent", [None, 2])
def test_an_index_is_read_as_json_reads_it(indent):
    assert index_of(json.dumps(INDEX, indent=indent, ensure_ascii=False).encode()) == INDEX


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'{"weight_map": {"a": "x",}}',
        b'{"weight_map": {"a" "x"}}',
        b'{"weight_map": {"a": "x" "b": "y"}}',
        b'{"weight_map": {"a": "x", "b": {"c": "y"}}}',
        b'{"weight_map": {"\\u0061": "x"}}',
        b'{"weight_map": {"a\n": "x"}}',
        b'{"weight_map": {"a": "x}"}}',
        b'{"weight_map": {"\xff": "x"}}',
        b'{"weight_map": {"a": "x"}',
        b'{"metadata": {"weight_map": {"a": "x"}}, "weight_map": {"b": "y"}}',
        b'{"metadata": "weight_map", "weight_map": {"a": 1}}',
        b'{"more": {"weight_map": {"a": "x"}}}',
        b'{"more": {"weight_map": {"a": "x", "b": "y"}}, "weight_map": {}}',
        b'{"weight_map": {"a": "x", "b": "y"}, "weight_map": {}}',
        b'{"weight_map": {"a": "x", "b": "y"}, "weight\\u005fmap": {}}',
    ],
)
def test_an_index_that_is_out_of_order_is_left_to_the_slow_way(raw):
    assert index_of(raw) is None


@given(st.data())
def test_one_changed_byte_never_changes_what_an_index_says(data):
    raw = json.dumps(INDEX).encode()
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([data.draw(st.integers(0, 255))]) + raw[at + 1 :]
    found = index_of(changed)
    assert found is None or found == json.loads(changed)
