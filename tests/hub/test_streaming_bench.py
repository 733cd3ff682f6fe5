"""Streaming at size: 8 GB through 2 GB of disk, and its time against a server of limited rate. Run by hand:

REQUANT_STREAM_GB=8 pytest tests/hub/test_streaming_bench.py -m bench -s
"""

import hashlib
import json
import os
import shutil
import sys
import time

import numpy as np
import pytest

pytestmark = pytest.mark.bench
GB = float(os.environ.get("REQUANT_STREAM_GB", "8"))
RATE = float(os.environ.get("REQUANT_STREAM_RATE", "100e6"))
"""Bytes per second of the server, in each direction."""
REPO = "tester/streamed"


def write_source(kit, nbytes):
    """BF16 layers of 32 MB in shards of an eighth; bits with exponents of ordinary weights. One buffer, rotated."""
    folder = kit.source("large", shards=1, layers=1)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    bits = kit.rng.integers(0x3A00, 0x3D80, (2048, 8192), dtype=np.uint16)
    bits |= kit.rng.integers(0, 2, bits.shape, dtype=np.uint16) << 15
    layers, weight_map = max(int(nbytes // bits.nbytes), 8), {}
    shards = 8
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = [f"model.layers.{i}.mlp.down_proj.weight" for i in range(layers) if i * shards // layers == shard]
        header = {
            name: {"dtype": "BF16", "shape": list(bits.shape), "data_offsets": [i * bits.nbytes, (i + 1) * bits.nbytes]}
            for i, name in enumerate(names)
        }
        end = len(names) * bits.nbytes
        if shard == 0:
            header["model.norm.weight"] = {"dtype": "BF16", "shape": [8192], "data_offsets": [end, end + 16384]}
            weight_map["model.norm.weight"] = file
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            for name in names:
                stream.write(np.roll(bits, len(name) * 7 + names.index(name)).tobytes())
            if shard == 0:
                stream.write(bits[0].tobytes())
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": layers * bits.nbytes + 16384}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": layers, "tie_word_embeddings": False})
    )
    return folder


def shas(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as stream:
            found[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def test_a_quarter_of_the_disk_and_the_time_of_the_slowest_part(hub, kit, client, disk_watch):
    source = write_source(kit, GB * 1e9)
    hub.put_folder("upstream/large", source)
    shard_size = max(int(GB * 25e6), 10_000_000)
    begin = time.monotonic()
    ordinary = kit.manifest(source, "ordinary", shard_size=shard_size)
    assert kit.requant("convert", ordinary, "--quiet") == 0
    convert = time.monotonic() - begin
    expected = shas(kit.tmp / "ordinary")
    written = sum(p.stat().st_size for p in (kit.tmp / "ordinary").glob("*.safetensors"))
    size = sum(e.size for n, e in hub.tree("upstream/large").items() if n.endswith(".safetensors"))
    hub.rate = RATE
    begin = time.monotonic()
    fetched = client.HfApi(endpoint=hub.url).snapshot_download("upstream/large", cache_dir=kit.tmp / "alone")
    download = time.monotonic() - begin
    shutil.rmtree(kit.tmp / "alone")
    assert fetched
    before = hub.sent("upstream/large.*safetensors")
    limit = int(GB * 1e9 / 4)
    manifest = kit.manifest(
        "upstream/large", "pushed", shard_size=shard_size, publish={"repo": REPO}, stream=True, max_disk=limit
    )
    begin = time.monotonic()
    with disk_watch(kit.tmp / "pushed") as watch:
        assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    took, most = time.monotonic() - begin, watch.most
    found = {n: e.lfs for n, e in hub.tree(REPO, "refs/pr/1").items() if n.endswith(".safetensors")}
    wire = hub.sent("upstream/large.*safetensors") - before
    slowest = max(download, convert, written / RATE)
    facts = {"source": size, "output": written, "disk": most, "limit": limit, "wire": wire / size}
    facts |= {"convert_s": convert, "download_s": download, "upload_s": written / RATE, "took_s": took}
    sys.stdout.write(json.dumps({**facts, "ratio": took / slowest}) + "\n")
    assert found == expected
    assert most <= limit
    assert wire <= 1.02 * size
    assert took <= 1.15 * slowest
