"""GGUF to Hugging Face: names, the rotary permutation, rounding, the tokenizer, and what is refused."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from requant.convert.gguf_llama import convert_gguf, hf_name, interleaved_to_halves, round_to_bf16
from requant.manifests.errors import SourceError, UsageError
from safetensors import safe_open

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 16
LETTERS = [chr(c) for c in range(ord("a"), ord("f"))]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "1", "2", "Ġ", "ab", "abc", "12"]
MERGES = ["a b", "ab c", "1 2"]
SHAPES = {
    "token_embd.weight": (len(TOKENS), HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HEADS * HEAD, HIDDEN),
    "blk.0.attn_k.weight": (KV_HEADS * HEAD, HIDDEN),
    "blk.0.attn_v.weight": (KV_HEADS * HEAD, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.ffn_gate.weight": (INNER, HIDDEN),
    "blk.0.ffn_up.weight": (INNER, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INNER),
}


def tiny_tensors(*, untied=False):
    rng = np.random.default_rng(0)
    shapes = SHAPES | ({"output.weight": (len(TOKENS), HIDDEN)} if untied else {})
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, tensors, *, architecture="llama", pre="smollm", packed=None):
    """A one-layer Llama GGUF; `packed` maps names to (raw uint8 rows, GGML type)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, values in tensors.items():
        if packed and name in packed:
            raw, kind = packed[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bf16(values):
    return np.asarray(values, dtype=np.float32).astype(ml_dtypes.bfloat16)


def read_bits(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        import torch

        return {name: file.get_tensor(name).view(torch.int16).numpy().view(np.uint16) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("heads", [1, 2, 9])
def test_rotary_rows_go_from_adjacent_pairs_to_two_halves(heads):
    d, columns = 8, 3
    weight = np.arange(heads * d * columns, dtype=np.float32).reshape(heads * d, columns)
    out = interleaved_to_halves(weight, heads)
    for head in range(heads):
        for pair in range(d // 2):
            for side in range(2):
                expected = weight[head * d + 2 * pair + side]
                np.testing.assert_array_equal(out[head * d + side * d // 2 + pair], expected)


def test_bf16_rounding_is_to_nearest_even_like_the_reference_type():
    bits = np.arange(0, 1 << 32, 65521 * 3, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(0x3F80, 0x3F90, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties + 1, ties - 1]).view(np.float32)
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(round_to_bf16(values), bf16(values).view(np.uint16))


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.29.attn_q.weight", "model.layers.29.self_attn.q_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.7.ffn_gate.weight", "model.layers.7.mlp.gate_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
    ],
)
def test_names_are_those_of_the_llama_class(gguf_name, expected):
    assert hf_name(gguf_name) == expected


@pytest.mark.parametrize("untied", [False, True])
def test_every_weight_arrives_under_its_name_with_its_value(tmp_path, untied):
    tensors = tiny_tensors(untied=untied)
    made = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "hf")
    found = read_bits(tmp_path / "hf")
    assert set(found) == {hf_name(name) for name in tensors}
    for name, values in tensors.items():
        heads = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}.get(name)
        expected = interleaved_to_halves(values, heads) if heads else values
        np.testing.assert_array_equal(found[hf_name(name)], bf16(expected).view(np.uint16), err_msg=name)
    total = sum(v.size for v in tensors.values())
    assert (made.tensors, made.weights, made.payload_bytes) == (len(tensors), total, 2 * total)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is not untied
    assert {k: config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")} == {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
    }
    assert (config["num_key_value_heads"], config["vocab_size"]) == (KV_HEADS, len(TOKENS))
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)


def test_q4_1_and_q8_0_blocks_decode_to_scale_times_code_plus_minimum(tmp_path):
    codes = (np.arange(32) % 16).astype(np.uint8)
    q4 = np.float16(0.5).tobytes() + np.float16(-3.0).tobytes() + bytes(codes[:16] | (codes[16:] << 4))
    q8 = np.float16(0.25).tobytes() + (np.arange(32) - 16).astype(np.int8).tobytes()
    packed = {
        "blk.0.ffn_up.weight": (
            np.tile(np.frombuffer(q4, np.uint8), (INNER, HIDDEN // 32)),
            gguf.GGMLQuantizationType.Q4_1,
        ),
        "token_embd.weight": (
            np.tile(np.frombuffer(q8, np.uint8), (len(TOKENS), HIDDEN // 32)),
            gguf.GGMLQuantizationType.Q8_0,
        ),
    }
    convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_tensors(), packed=packed), tmp_path / "hf")
    found = read_bits(tmp_path / "hf")
    up = bf16(np.tile(codes * 0.5 - 3.0, (INNER, HIDDEN // 32)))
    np.testing.assert_array_equal(found["model.layers.0.mlp.up_proj.weight"], up.view(np.uint16))
    embedding = bf16(np.tile((np.arange(32) - 16) * 0.25, (len(TOKENS), HIDDEN // 32)))
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding.view(np.uint16))


def test_tokenizer_splits_digits_merges_letters_and_knows_its_control_tokens(tmp_path):
    from tokenizers import Tokenizer

    convert_gguf(write_gguf(tmp_path / "m.gguf", tiny_tensors()), tmp_path / "hf")
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>abcd12").tokens == ["<|im_start|>", "abc", "d", "1", "2"]
    assert tokenizer.decode([TOKENS.index("abc"), TOKENS.index("Ġ"), TOKENS.index("d")]) == "abc d"
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert settings["chat_template"] == "{{ messages }}"


def test_the_same_file_gives_the_same_bytes(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_tensors())
    folders = [convert_gguf(source, tmp_path / name).folder for name in ("a", "b")]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name


def nan_tensors():
    tensors = tiny_tensors()
    tensors["blk.0.ffn_down.weight"][3, 5] = np.nan
    return tensors


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (nan_tensors(), {}, r"blk\.0\.ffn_down\.weight.*infinity or NaN"),
        (tiny_tensors() | {"blk.0.ssm_in.weight": np.ones((4, 32), np.float32)}, {}, r"ssm_in\.weight' has no place"),
        (tiny_tensors() | {"blk.0.attn_k.weight": np.ones((6, 32), np.float32)}, {}, "6 rows, which 2 heads"),
        (tiny_tensors(), {"architecture": "mamba"}, "architecture 'mamba'"),
        (tiny_tensors(), {"pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
    ],
)
def test_what_is_not_such_a_model_is_refused_and_leaves_no_output(tmp_path, tensors, options, message):
    source = write_gguf(tmp_path / "m.gguf", tensors, **options)
    with pytest.raises(SourceError, match=message):
        convert_gguf(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("damage", ["text", "truncated"])
def test_a_damaged_file_is_named(tmp_path, damage):
    source = write_gguf(tmp_path / "m.gguf", tiny_tensors())
    source.write_bytes(b"not a model at all" * 9 if damage == "text" else source.read_bytes()[:-4000])
    with pytest.raises(SourceError, match=r"m\.gguf: not a readable GGUF file"):
        convert_gguf(source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_an_existing_folder_is_not_touched(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_tensors())
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="exists already"):
        convert_gguf(source, tmp_path / "hf")
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["mine.txt"]


def test_a_run_after_an_interrupted_one_leaves_nothing_of_it(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", tiny_tensors())
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "stale.txt").write_text("old")
    convert_gguf(source, tmp_path / "hf")
    assert not (tmp_path / "hf.partial").exists()
    assert not (tmp_path / "hf" / "stale.txt").exists()
