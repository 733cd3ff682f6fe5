"""Some layers of a converted checkpoint, and what their linear modules are fed on a text, for w4a4_layers.py.

    python tests/gpu/capture_layers.py HF_MODEL CONVERTED OUT --layers 0 15 --tokens 48

HF_MODEL (BF16, run by transformers on the CPU) gives the activations, CONVERTED (NVFP4) the weights. OUT gets
`weights/model.safetensors` with a config.json, and `activations.safetensors`: [tokens, K] BF16 by module name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

TEXT = (
    "The library stands between the river and the old market. Every morning its doors open at nine, and by ten the "
    "long tables are full: students with 3.14159 in their notes, a man who reads the same atlas each day, two children "
    "who ask what a quaternion is. def main() -> None: print('hello') and then, suddenly, rain."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    for name in ("model", "converted", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 15])
    parser.add_argument("--tokens", type=int, default=48)
    given = parser.parse_args()
    (given.out / "weights").mkdir(parents=True)
    prefixes = tuple(f"model.layers.{layer}." for layer in given.layers)
    with safe_open(given.converted / "model.safetensors", "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefixes)}  # noqa: SIM118
    save_file(kept, given.out / "weights" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((given.converted / "config.json").read_text())
    (given.out / "weights" / "config.json").write_text(json.dumps(config))
    save_file(capture(given.model, prefixes, given.tokens), given.out / "activations.safetensors")


def capture(model: Path, prefixes: tuple[str, ...], tokens: int) -> dict[str, torch.Tensor]:
    """Inputs of the linear modules whose names begin so, in a forward pass over TEXT."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = AutoTokenizer.from_pretrained(model)(TEXT, return_tensors="pt").input_ids[:, :tokens]
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, inputs, __: found.update({name: inputs[0][0].detach().to(torch.bfloat16).clone()})

    for name, module in net.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith(prefixes):
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        net(ids)
    return found


if __name__ == "__main__":
    main()
