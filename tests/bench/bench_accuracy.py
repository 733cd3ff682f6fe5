"""Formats x scale choices on SmolLM2-135M: weight SQNR, and KL and perplexity on two texts, all against the BF16 model.

    python -m requant.convert.smollm2 WORK/SmolLM2
    pip download --no-deps --no-binary :all: sentencepiece==0.2.3 && tar xzf sentencepiece-0.2.3.tar.gz
    python tests/bench/bench_accuracy.py WORK --botchan sentencepiece-0.2.3/test/botchan.txt [--write docs/accuracy.md]

Needs the extra eval. Every variant is a manifest that goes through the whole converter; the model then computes with
the packed weights as they are stored, in FP32 (validate/load_model.py). Scored are 4 x 512 tokens of each text, from an
eighth of it on; calibration runs on 64 x 512 tokens from the second halves of both, which hold no scored token. Results
go to WORK/accuracy.json as they come, and a variant that stands there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from requant.convert.pipeline import prepare, run_job
from requant.kernels.empty_model import encode, load_tokenizer
from requant.validate.divergence import Positions, compare_logits, mean_of, ratio_of
from requant.validate.load_model import load_model

STRETCHES, LENGTH = 4, 512
CALIBRATION_CHARACTERS = 70_000
"""From either text: 64 sequences of 512 tokens in all."""
CT = "layout: compressed-tensors"
NVFP4, W4A16, MXFP4 = "format: nvfp4", "format: nvfp4-w4a16", f"format: mxfp4, {CT}"
FP8 = f"format: fp8, {CT}"
VARIANTS = {  # name: (what the table says, rule, target, source variant or None for BF16, calibrated, W4A4)
    "bf16": ("BF16 (the source)", None, None, None, False, False),
    "fp8": ("FP8 per tensor, nearest", "to: fp8", "format: fp8", None, False, False),
    "fp8-channel": ("FP8 per channel, nearest", "to: fp8, granularity: channel", FP8, None, False, False),
    "fp8-block": ("FP8 per 128 x 128, nearest", "to: fp8, granularity: block", FP8, None, False, False),
    "nvfp4-nearest": ("NVFP4 nearest (= modelopt)", "to: nvfp4, scale: nearest", W4A16, None, False, False),
    "nvfp4-four-over-six": ("NVFP4 four-over-six", "to: nvfp4, scale: four-over-six", W4A16, None, False, False),
    "nvfp4-mse": ("NVFP4 mse", "to: nvfp4, scale: mse", W4A16, None, False, False),
    "nvfp4-weighted": ("NVFP4 weighted", "to: nvfp4, scale: weighted", W4A16, None, True, False),
    "nvfp4-nearest-gptq": (
        "NVFP4 nearest + gptq",
        "to: nvfp4, scale: nearest, rounding: gptq",
        W4A16,
        None,
        True,
        False,
    ),
    "nvfp4-mse-gptq": ("NVFP4 mse + gptq", "to: nvfp4, scale: mse, rounding: gptq", W4A16, None, True, False),
    "nvfp4-weighted-gptq": (
        "NVFP4 weighted + gptq",
        "to: nvfp4, scale: weighted, rounding: gptq",
        W4A16,
        None,
        True,
        False,
    ),
    "mxfp4-nearest": ("MXFP4 nearest (= modelopt)", "to: mxfp4", MXFP4, None, False, False),
    "mxfp4-gptq": ("MXFP4 nearest + gptq", "to: mxfp4, rounding: gptq", MXFP4, None, True, False),
    "mxfp4-nvfp4": ("MXFP4 -> NVFP4 lossless", "to: nvfp4, scale: lossless", NVFP4, "mxfp4-nearest", False, False),
    "mxfp4-bf16": ("MXFP4 -> BF16", "to: bf16", "format: bf16", "mxfp4-nearest", False, False),
    "mxfp4-bf16-nvfp4": (
        "MXFP4 -> BF16 -> NVFP4 nearest",
        "to: nvfp4, scale: nearest",
        W4A16,
        "mxfp4-bf16",
        False,
        False,
    ),
    "mxfp4-bf16-nvfp4-mse": (
        "MXFP4 -> BF16 -> NVFP4 mse",
        "to: nvfp4, scale: mse",
        W4A16,
        "mxfp4-bf16",
        False,
        False,
    ),
    "w4a4-constant": ("NVFP4 nearest, W4A4, input_scale 1.0", "to: nvfp4, scale: nearest", NVFP4, None, False, True),
    "w4a4-calibrated": ("NVFP4 nearest, W4A4, calibrated", "to: nvfp4, scale: nearest", NVFP4, None, True, True),
}
HIDDEN = ("mxfp4-bf16",)


def texts(botchan: Path) -> dict[str, str]:
    topics: dict[str, str] = pydoc_data.topics.topics
    return {
        "botchan": botchan.read_text(encoding="utf-8"),
        "pydoc topics": "\n\n".join(topics[name] for name in sorted(topics)),
    }


def calibration_text(of: dict[str, str]) -> str:
    return "\n\n".join(t[len(t) // 2 : len(t) // 2 + CALIBRATION_CHARACTERS] for t in of.values())


def stretches(of: dict[str, str], tokenizer: object) -> dict[str, torch.Tensor]:
    """Per text, token ids [4, 513]: of each row the last 512 are scored."""
    found = {}
    for name, text in of.items():
        ids = encode(tokenizer, text[len(text) // 8 : len(text) // 2], special=False)
        rows = [ids[at * LENGTH : (at + 1) * LENGTH + 1] for at in range(STRETCHES)]
        assert all(len(row) == LENGTH + 1 for row in rows)
        found[name] = torch.tensor(rows)
    return found


def convert(name: str, work: Path) -> Path:
    """The variant's output folder, converted if need be."""
    _, rule, target, base, calibrated, _ = VARIANTS[name]
    if rule is None:
        return work / "SmolLM2"
    out = work / f"out-{name}"
    if (out / "requant.lock.json").exists():
        return out
    source = work / "SmolLM2" if base is None else convert(base, work)
    extra = ""
    if calibrated:
        extra = f"activations: {{calibrate: {{text: {work / 'calibration.txt'}, samples: 64, sequence_length: 512}}}}\n"
    manifest = work / f"{name}.yaml"
    manifest.write_text(
        f"version: 1\nname: {name}\nsource: {{path: {source}}}\ntarget: {{{target}, output: {out}}}\n"
        f"layers:\n  - {{match: 'model.layers.*_proj', {rule}}}\n  - {{match: '*', to: keep}}\n{extra}"
    )
    run_job(prepare(str(manifest)), force=True)
    return out


def weights(model: object) -> dict[str, torch.Tensor]:
    """Every projection of the decoder layers, decoded."""
    found = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            found[name] = module.packed.decoded() if hasattr(module, "packed") else module.weight.detach()
    return found


def sqnr_db(exact: dict[str, torch.Tensor], model: object) -> float:
    """Over all projections together."""
    signal = noise = 0.0
    for name, values in weights(model).items():
        signal += float(exact[name].double().square().sum())
        noise += float((values.double() - exact[name].double()).square().sum())
    return math.inf if not noise else 10 * math.log10(signal / noise)


def score(model: object, scored: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    with torch.inference_mode():
        return {
            name: [model(input_ids=row[None], use_cache=False).logits[0, :-1] for row in rows]
            for name, rows in scored.items()
        }


def measure(name: str, work: Path, scored: dict, source: dict, exact: dict[str, torch.Tensor]) -> dict:
    begin = time.perf_counter()
    folder = convert(name, work)
    converted = time.perf_counter() - begin
    model = load_model(folder, w4a4=VARIANTS[name][5]).model
    row = {"sqnr_db": sqnr_db(exact, model), "convert_s": round(converted, 1), "texts": {}}
    for text, logits in score(model, scored).items():
        parts = [compare_logits(p, q, ids[1:]) for p, q, ids in zip(source[text], logits, scored[text], strict=True)]
        seen = Positions.joined(parts)
        kl, ratio, nll = mean_of(seen.kl), ratio_of(seen), mean_of(seen.nll_target)
        row["texts"][text] = {
            "kl": kl.value,
            "kl_stderr": kl.error,
            "perplexity": math.exp(nll.value),
            "perplexity_stderr": math.exp(nll.value) * (nll.error or 0.0),
            "ratio": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "top1": float(np.mean(seen.agree)),
        }
    return row


def table(results: dict) -> str:
    names = list(next(iter(results.values()))["texts"])
    head = ["variant", "SQNR dB"]
    for text in names:
        head += [f"KL, {text}", f"perplexity, {text}", "ratio (95%)"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] + ['--:'] * (len(head) - 1))}|"]
    for name, (title, *_) in VARIANTS.items():
        if name not in results or name in HIDDEN:
            continue
        row = results[name]
        sqnr = row["sqnr_db"]
        cells = [title, "exact" if math.isinf(sqnr) else f"{sqnr:.2f}"]
        for text in names:
            t = row["texts"][text]
            cells += [
                f"{t['kl']:.4f} +- {t['kl_stderr']:.4f}",
                f"{t['perplexity']:.2f} +- {t['perplexity_stderr']:.2f}",
                f"{t['ratio']:.3f} ({t['ratio_low']:.3f} to {t['ratio_high']:.3f})",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--botchan", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=VARIANTS)
    parser.add_argument("--again", action="store_true", help="measure what stands in accuracy.json too")
    parser.add_argument("--write", type=Path, help="put the table between the markers of this Markdown file")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    of = texts(arguments.botchan)
    (work / "calibration.txt").write_text(calibration_text(of), encoding="utf-8")
    kept = work / "accuracy.json"
    results = json.loads(kept.read_text()) if kept.exists() and not arguments.again else {}
    wanted = [name for name in arguments.only or VARIANTS if name not in results and name not in HIDDEN]
    if wanted:
        scored = stretches(of, load_tokenizer(work / "SmolLM2"))
        model = load_model(work / "SmolLM2").model
        source, exact = score(model, scored), weights(model)
        for name in wanted:
            results[name] = measure(name, work, scored, source, exact)
            kept.write_text(json.dumps(results, indent=1))
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
            if name not in ("bf16", "mxfp4-nearest"):
                shutil.rmtree(work / f"out-{name}", ignore_errors=True)
    made = table(results)
    print(made)
    if arguments.write:
        text = arguments.write.read_text(encoding="utf-8")
        before, _, rest = text.partition("<!-- table -->\n")
        after = rest.partition("<!-- end -->")[2]
        arguments.write.write_text(f"{before}<!-- table -->\n{made}\n<!-- end -->{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
