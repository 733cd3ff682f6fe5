"""A source on the Hub: fetched by huggingface_hub into its own cache, pinned to a commit."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from requant.manifests.errors import EnvironmentFault, SourceError

__all__ = ["fetch"]


def fetch(repo: str, revision: str) -> tuple[Path, str]:
    """(snapshot folder, commit) of `repo` at `revision`. The Hub cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE hold
    as for any user of huggingface_hub. SourceError if the repository, revision or file is not there."""
    hub: Any = import_module("huggingface_hub")  # its signatures are only partly typed
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    ignore = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "metal/*"]
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, ignore_patterns=ignore))
    except GatedRepoError as error:
        raise SourceError(
            "is gated", where=repo, hint="accept its terms on the Hub and log in with `hf auth login` or HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            "repository not found, or private and no valid token", where=repo, hint="check the name; `hf auth whoami`"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"has no revision {revision}", where=repo, hint="name a branch, tag or commit") from error
    except LocalEntryNotFoundError as error:
        raise EnvironmentFault(
            "the Hub cannot be reached and the cache does not hold the checkpoint",
            where=repo,
            hint="check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give source.path",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise EnvironmentFault(
            f"download failed: {error}", where=repo, hint="run the same command again: finished files are kept"
        ) from error
    return folder, folder.name
