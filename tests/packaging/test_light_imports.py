"""Asking costs little: help, checks and plans import neither torch nor transformers, nor the compilers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

HEAVY = (
    *("torch", "transformers", "numba", "gguf", "tokenizers", "matplotlib", "huggingface_hub"),
    *("fsspec", "s3fs", "botocore", "gcsfs", "ray"),
)
PROBE = """
import sys
from requant.convert.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code or 0
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY))
print(f"exit {code} loaded {loaded}", file=sys.stderr)
"""
MANIFEST = """
version: 1
name: tiny
source: {path: SOURCE}
target: {format: mxfp4, layout: compressed-tensors, output: OUTPUT}
layers:
  - {match: "model.layers.*_proj", to: mxfp4, scale: nearest}
  - {match: "*", to: keep}
"""


def heavy_modules(*arguments, cwd, names=HEAVY):
    """Which of `names` a command line imported; the command must succeed."""
    probe = f"HEAVY = {names!r}\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    code, _, loaded = done.stderr.strip().rpartition("\n")[2].removeprefix("exit ").partition(" loaded ")
    assert (code, done.returncode) == ("0", 0), done.stdout + done.stderr
    return loaded


@pytest.fixture
def folder(tmp_path):
    """A manifest beside a one-layer plain checkpoint."""
    source = tmp_path / "source"
    source.mkdir()
    tensors = {
        "model.embed_tokens.weight": np.ones((8, 64), np.float32),
        "model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32),
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = MANIFEST.replace("SOURCE", str(source)).replace("OUTPUT", str(tmp_path / "out"))
    (tmp_path / "m.yaml").write_text(text)
    return tmp_path


def test_the_probe_sees_what_is_imported(folder):
    assert heavy_modules("check", "m.yaml", cwd=folder, names=("yaml", "pydantic", "torch")) == "['pydantic', 'yaml']"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("plan", "--help"),
        ("schema",),
        ("check", "m.yaml"),
        ("plan", "m.yaml"),
        ("inspect", "source"),
    ],
    ids=" ".join,
)
def test_asking_imports_nothing_heavy(folder, arguments):
    assert heavy_modules(*arguments, cwd=folder) == "[]"
    assert not (Path(folder) / "out").exists()
