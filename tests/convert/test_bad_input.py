"""Damaged, hostile and mistaken sources: one message, exit code 3, no output, the source as it was."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
from requant.convert.cli import main

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"


def fingerprint(folder):
    """Path -> link target or sha256 of the content, of everything in a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def edit_header(path, change, keep_padding=False):
    """Rewrite a shard's header through change(dict); the data stays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text = text.ljust(length) if keep_padding else text
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def tensor_of(folder, suffix, shard=SHARD):
    """Name of the first tensor of a shard that ends in `suffix`."""
    raw = (folder / shard).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return next(name for name in header if name.endswith(suffix))


def set_entry(folder, suffix, **fields):
    """Overwrite header fields of one tensor; its name."""
    name = tensor_of(folder, suffix)
    edit_header(folder / SHARD, lambda header: header[name].update(fields))
    return name


DAMAGES = []


def damage(function):
    """Add a way of spoiling a checkpoint to the list."""
    DAMAGES.append(function)
    return function


# Each damage does its work and returns what the message must say: file, tensor, fault, and what to do.


@damage
def truncated(folder):
    path = folder / SHARD
    size = path.stat().st_size
    os.truncate(path, size - 100)
    return [SHARD, "truncated", f"{size:,}", f"{size - 100:,}", "download"]


@damage
def over_long(folder):
    with (folder / SHARD).open("ab") as handle:
        handle.write(b"\0" * 7)
    return [SHARD, "over-long", "download"]


@damage
def empty(folder):
    (folder / SHARD).write_bytes(b"")
    return [SHARD, "0 bytes long", "download"]


@damage
def cut_in_header(folder):
    os.truncate(folder / SHARD, 50)
    return [SHARD, "truncated inside its header", "download"]


@damage
def lfs_pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4921134512\n"
    (folder / SHARD).write_text(text)
    return [SHARD, "Git LFS pointer", "git lfs pull"]


@damage
def lfs_pointer_for_the_config(folder):
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    return ["config.json", "Git LFS pointer", "git lfs pull"]


@damage
def lfs_pointer_for_the_tokenizer(folder):
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n")
    return ["tokenizer.json", "Git LFS pointer", "git lfs pull"]


@damage
def header_too_long(folder):
    (folder / SHARD).write_bytes((100_000_001).to_bytes(8, "little") + b"{}")
    return [SHARD, "100,000,001", "100,000,000", "damaged or not safetensors"]


@damage
def header_not_json(folder):
    (folder / SHARD).write_bytes((8).to_bytes(8, "little") + b"{oh dear" + b"\0" * 8)
    return [SHARD, "not JSON", "download"]


@damage
def header_not_utf8(folder):
    (folder / SHARD).write_bytes((8).to_bytes(8, "little") + b'{"\xff\xfe":1' + b"\0" * 8)
    return [SHARD, "not JSON", "download"]


@damage
def header_nested_without_end(folder):
    (folder / SHARD).write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    return [SHARD, "not JSON", "download"]


@damage
def header_a_list(folder):
    (folder / SHARD).write_bytes((8).to_bytes(8, "little") + b"[]      ")
    return [SHARD, "not a JSON object", "download"]


@damage
def entry_without_offsets(folder):
    name = tensor_of(folder, ".weight")
    edit_header(folder / SHARD, lambda header: header[name].pop("data_offsets"))
    return [SHARD, name, "malformed", "download"]


@damage
def entry_not_an_object(folder):
    name = tensor_of(folder, ".weight")
    edit_header(folder / SHARD, lambda header: header.update({name: [1, 2]}))
    return [SHARD, name, "malformed", "download"]


@damage
def negative_dimension(folder):
    return [SHARD, set_entry(folder, "w1.weight", shape=[-1, -32]), "malformed"]


@damage
def fractional_dimension(folder):
    return [SHARD, set_entry(folder, "w1.weight", shape=[1.5, 2]), "malformed"]


@damage
def dtype_a_list(folder):
    return [SHARD, set_entry(folder, "w1.weight", dtype=["I8"]), "malformed"]


@damage
def dtype_unknown(folder):
    return [SHARD, set_entry(folder, "w1.weight", dtype="F3_E2M0"), "unknown dtype 'F3_E2M0'", "newer safetensors"]


@damage
def shape_and_offsets_disagree(folder):
    return [SHARD, set_entry(folder, "w1.weight", shape=[7, 9]), "needs 63 bytes"]


@damage
def offsets_overlap(folder):
    name = tensor_of(folder, ".scale")

    def change(header):
        begin, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = [begin - 8, end - 8]

    edit_header(folder / SHARD, change)
    return [SHARD, "overlaps the tensor before it", "side by side"]


@damage
def offsets_leave_a_hole(folder):
    name = tensor_of(folder, ".scale")
    edit_header(folder / SHARD, lambda header: header.pop(name))
    return [SHARD, "leaves a hole before it", "side by side"]


@damage
def four_bit_tensor_of_odd_count(folder):
    return [SHARD, set_entry(folder, "w1.weight", dtype="F4", shape=[1, 3]), "3 elements of F4 do not fill whole bytes"]


@damage
def shard_missing(folder):
    (folder / SHARD).unlink()
    return [SHARD, "shard is missing", "tensors of the index lie in it", "download"]


@damage
def shard_a_folder(folder):
    (folder / SHARD).unlink()
    (folder / SHARD).mkdir()
    return [SHARD, "cannot be read"]


@damage
def index_lacks_a_tensor(folder):
    name = tensor_of(folder, ".scale")
    edit_index(folder, lambda weight_map: weight_map.pop(name))
    return [SHARD, name, "not in the index", "two exports"]


@damage
def index_names_a_tensor_that_is_not_there(folder):
    edit_index(folder, lambda weight_map: weight_map.update({"layers.9.ghost.weight": SHARD}))
    return [SHARD, "layers.9.ghost.weight", "no shard holds it", "two exports"]


@damage
def index_names_the_wrong_shard(folder):
    name = tensor_of(folder, ".scale")
    edit_index(folder, lambda weight_map: weight_map.update({name: "model-00001-of-00002.safetensors"}))
    return [name, f"it lies in {SHARD}", "two exports"]


@damage
def index_missing(folder):
    (folder / INDEX).unlink()
    return ["2 shards and no", INDEX, "download the index too"]


@damage
def index_not_json(folder):
    (folder / INDEX).write_text("{")
    return [INDEX, "not JSON", "download"]


@damage
def index_without_a_map(folder):
    (folder / INDEX).write_text('{"metadata": {}}')
    return [INDEX, "weight_map is missing or empty"]


@damage
def index_holds_a_list(folder):
    edit_index(folder, lambda weight_map: weight_map.update({tensor_of(folder, ".scale"): [SHARD]}))
    return [INDEX, "instead of a file name", "fix the index"]


@damage
def index_path_absolute(folder):
    edit_index(folder, lambda weight_map: weight_map.update({tensor_of(folder, ".scale"): "/etc/passwd"}))
    return [INDEX, "'/etc/passwd'", "leads out of the checkpoint's folder"]


@damage
def index_path_upwards(folder):
    edit_index(folder, lambda weight_map: weight_map.update({tensor_of(folder, ".scale"): f"../x/{SHARD}"}))
    return [INDEX, f"'../x/{SHARD}'", "leads out of the checkpoint's folder"]


@damage
def index_names_a_pickle(folder):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    edit_index(folder, lambda weight_map: weight_map.update({tensor_of(folder, ".scale"): "pytorch_model.bin"}))
    return ["pytorch_model.bin", "pickle", "run code", "save_pretrained"]


@damage
def only_pickles(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(b"\x80\x04.")
    return ["pytorch_model-00001-of-00001.bin", "pickle", "run code", "save_pretrained"]


@damage
def no_weights_at_all(folder):
    for path in folder.glob("model*"):
        path.unlink()
    return ["src", "no .safetensors file", "download complete?"]


@damage
def config_missing(folder):
    (folder / "config.json").unlink()
    return ["src", "config.json is missing"]


@damage
def config_a_list(folder):
    (folder / "config.json").write_text("[]")
    return ["config.json", "not a JSON object"]


@damage
def config_quantization_a_string(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": "fp8"}))
    return ["config.json", "quantization_config is not an object"]


@damage
def one_tensor_in_two_shards(folder):
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    (folder / SHARD).write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = dict.fromkeys(["a", "b"], "model.safetensors") | {"c": SHARD}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return [SHARD, "embed.weight also stands in", "stale file"]


@damage
def shard_links_out(folder):
    outside = folder.parent / "elsewhere.safetensors"
    (folder / SHARD).rename(outside)
    (folder / SHARD).symlink_to(outside)
    return [SHARD, "a link that leads out", "copy the file into the folder"]


@damage
def config_links_out(folder):
    outside = folder.parent / "elsewhere.json"
    (folder / "config.json").rename(outside)
    (folder / "config.json").symlink_to(outside)
    return ["config.json", "a link that leads out"]


@damage
def quant_config_links_out(folder):
    outside = folder.parent / "elsewhere.json"
    outside.write_text("{}")
    (folder / "hf_quant_config.json").symlink_to(outside)
    return ["hf_quant_config.json", "a link that leads out"]


@damage
def sidecar_links_out(folder):
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    return ["tokenizer.json", "a link that leads out"]


@damage
def sidecar_links_to_nothing(folder):
    (folder / "tokenizer.json").symlink_to("gone.json")
    return ["tokenizer.json", "a link to nothing"]


@damage
def sidecar_a_pipe(folder):
    os.mkfifo(folder / "tokenizer.json")
    return ["tokenizer.json", "not a regular file"]


@damage
def scale_plane_of_other_shape(folder):
    name = tensor_of(folder, ".scale")
    edit_header(folder / SHARD, lambda header: header[name].update(shape=header[name]["shape"][::-1]))
    return [SHARD, name, "scale plane is", "one scale per 32"]


@damage
def scale_plane_of_other_dtype(folder):
    return [SHARD, set_entry(folder, ".scale", dtype="F8_E4M3"), "scale dtype is F8_E4M3, expected F8_E8M0"]


@damage
def packed_weight_of_one_dimension(folder):
    name = tensor_of(folder, "w1.weight")

    def change(header):
        n, k = header[name]["shape"]
        header[name]["shape"] = [n * k]

    edit_header(folder / SHARD, change)
    return [SHARD, name, "expected [N, K/2]"]


@damage
def nan_scale(folder):
    name = tensor_of(folder, "experts.1.w3.scale", "model-00001-of-00002.safetensors")
    path = folder / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    begin = json.loads(raw[8 : 8 + length])[name]["data_offsets"][0]
    raw[8 + length + begin + 2 * 5 + 1] = 255  # plane [32, 2]: row 5, block 1
    path.write_bytes(raw)
    return [path.name, name, "E8M0 scale 255 (NaN) at row 5, block 1", "corrupt"]


def run(capsys, *arguments):
    """Exit code, stdout, stderr of the command line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.mark.parametrize("spoil", DAMAGES, ids=lambda spoil: spoil.__name__)
def test_a_bad_source_gets_one_message_exit_3_and_no_output(kit, capsys, spoil):
    source = kit.dsv4()
    said = spoil(source)
    before = fingerprint(source)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    code, out, err = run(capsys, "run", str(manifest), "--quiet")
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert "\n  -> " in err
    for words in said:
        assert words in err
    assert not (kit.tmp / "out").exists()
    assert not list(kit.tmp.glob("out.partial/*.safetensors"))
    assert fingerprint(source) == before


def test_an_undamaged_source_passes_the_same_way(kit, capsys):
    source = kit.dsv4()
    before = fingerprint(source)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    assert run(capsys, "run", str(manifest), "--quiet")[0] == 0
    assert fingerprint(source) == before


@pytest.mark.parametrize(
    ("k", "message"), [(48, "K = 48 is not a multiple of 32"), (16, "K = 16 is not a multiple of 32")]
)
def test_k_that_is_no_multiple_of_32_is_refused_and_never_truncated(kit, capsys, k, message):
    """C85."""
    name = "layers.0.ffn.experts.0.w1"
    tensors = {
        f"{name}.weight": ("I8", (16, k // 2), bytes(16 * k // 2)),
        f"{name}.scale": ("F8_E8M0", (16, max(k // 32, 1)), b"\x7f" * 16 * max(k // 32, 1)),
    }
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    code, _, err = run(capsys, "run", str(manifest), "--quiet")
    assert code == 3
    assert f"model.safetensors: {name}.weight: {message}" in err
    assert not (kit.tmp / "out").exists()


def test_a_source_folder_that_is_not_there_is_named(kit, capsys):
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(kit.tmp / "nowhere", kit.tmp / "out", kit.EXPERTS))
    code, _, err = run(capsys, "run", str(manifest), "--quiet")
    assert code == 3
    assert f"{kit.tmp / 'nowhere'}: is not a folder" in err


@pytest.mark.parametrize("verb", ["plan", "inspect", "init", "diff"])
def test_every_verb_that_reads_a_checkpoint_refuses_a_damaged_one(kit, capsys, verb):
    source = kit.dsv4()
    truncated(source)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    arguments = {"plan": [str(manifest)], "diff": [str(source), str(source)]}.get(verb, [str(source)])
    code, out, err = run(capsys, verb, *arguments)
    assert (code, out) == (3, "")
    assert re.search(rf"error: {SHARD}: truncated: .*\n  -> download", err)


def test_a_scan_finds_the_nan_scale_before_anything_is_written(kit, capsys):
    """C10."""
    source = kit.dsv4()
    said = nan_scale(source)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    code, _, err = run(capsys, "plan", str(manifest), "--scan", "--quiet")
    assert code == 3
    assert all(words in err for words in said)
    assert not (kit.tmp / "out.partial").exists()


def test_the_message_comes_without_a_traceback_from_the_real_program(kit):
    source = kit.dsv4()
    truncated(source)
    manifest = kit.tmp / "m.yaml"
    manifest.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS))
    done = subprocess.run(
        [sys.executable, "-m", "requant.convert.cli", "run", str(manifest)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout == ""
    assert re.fullmatch(rf"error: {SHARD}: truncated: [^\n]*\n  -> [^\n]*\n", done.stderr)
