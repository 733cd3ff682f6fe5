"""A transformers model without weights: every parameter on the meta device, every buffer as its class computes it.

Both who judge a checkpoint and who calibrate one need the forward pass of a model whose weights they bring themselves,
one at a time: as packed FP4, or as values that are freed again after use. `from_pretrained` cannot do that: it has a
reader, dequantizers and a device map of its own. So the class is built from the config alone, on the meta device, and
its non-persistent buffers (the rotary frequencies), which no checkpoint holds, are computed by the class's own
`_init_weights`, as `from_pretrained` does.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "ModelUnavailableError",
    "empty_model",
    "encode",
    "load_tokenizer",
    "meta_parameters",
    "quiet_transformers",
    "tie_head",
    "transformers_module",
]


class ModelUnavailableError(RuntimeError):
    """The model, or its tokenizer, cannot be had here; the message says why and what would help."""


def empty_model(folder: Path, *, trust_remote_code: bool = False, base: bool = False) -> Any:
    """The causal language model that folder's config.json describes, in FP32, in eval mode, parameters on meta.

    base: without the output head. ModelUnavailableError where transformers is missing or has no such class. Code that
    the checkpoint carries is run only with trust_remote_code.
    """
    import torch

    classes = transformers_module()
    with quiet_transformers():
        try:
            config: Any = classes.AutoConfig.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            auto: Any = classes.AutoModel if base else classes.AutoModelForCausalLM
            with torch.device("meta"):
                model: Any = auto.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelUnavailableError(
                f"transformers {classes.__version__} cannot build this model: {first}"
            ) from error
        _compute_buffers(model)
    return model.eval()


def transformers_module() -> Any:
    """The package transformers; ModelUnavailableError names the extra that brings it."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModelUnavailableError(f"{error.name} is not installed: pip install 'requant[eval]'") from error


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer that stands in a checkpoint's folder; ModelUnavailableError where there is none that loads."""
    classes = transformers_module()
    with quiet_transformers():
        try:
            return classes.AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:  # the tokenizers library raises bare Exception
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelUnavailableError(f"the folder has no tokenizer that transformers can load: {first}") from error


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """Token ids of a text. special: with what the model expects around it, such as a first token."""
    with quiet_transformers():
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _compute_buffers(model: Any) -> None:
    """Give every buffer storage, and the value that its class gives it."""
    import torch

    with torch.no_grad():
        for module in model.modules():
            own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            if not own:
                continue
            for name, buffer in own.items():
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
            model._init_weights(module)


def meta_parameters(module: Any) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of each parameter that has no values yet; tied ones come once."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            yield name, parameter


def tie_head(model: Any) -> bool:
    """Give the output head the input embedding's weight, if the config ties them; says whether it did."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    head = model.get_output_embeddings()
    if head is None or not getattr(text, "tie_word_embeddings", False):
        return False
    head.weight = model.get_input_embeddings().weight
    return True


@contextmanager
def quiet_transformers() -> Generator[None]:
    """No hints of transformers on stderr: they speak of `from_pretrained`, which is not what happens here."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
