"""The stage `model` on real transformers classes: goldens of modelopt against the checkpoints they were made from."""

import json

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra eval")

import torch
from requant.kernels.empty_model import ModelUnavailableError
from requant.manifests.gates import ModelGate
from requant.validate.load_model import load_model
from requant.validate.model import check_model
from requant.validate.results import Status
from safetensors.torch import load_file, save_file


def judge(source, output, text, *, lossless=False, target="nvfp4", **fields):
    made = ModelGate(text=text, **{"tokens": 512, "sequence_length": 64, **fields})
    seen = []
    result = check_model(
        source, output, made, target=target, lossless=lossless, progress=lambda done, total: seen.append((done, total))
    )
    return result, seen


def logits(folder, **options):
    model = load_model(folder, **options).model
    with torch.inference_mode():
        return model(input_ids=torch.arange(1, 100)[None] % 128, use_cache=False).logits[0]


def test_plain_weights_compute_what_from_pretrained_computes(golden):
    import transformers

    for name in ("_src_llama_bf16", "_src_qwen3moe_bf16"):
        folder = golden(name)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            expected = theirs(input_ids=torch.arange(1, 100)[None] % 128, use_cache=False).logits[0]
        np.testing.assert_allclose(logits(folder).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_mxfp4_to_nvfp4_without_loss_has_no_divergence_and_the_same_greedy_tokens(
    golden, text, tmp_path, lossless_nvfp4, layout
):
    source = golden("llama_mxfp4")
    output = lossless_nvfp4(source, tmp_path / "output", layout)
    assert torch.equal(logits(source), logits(output))
    result, seen = judge(source, output, text, lossless=True)
    assert result.status is Status.PASSED, result.reason
    assert result.data["identical_logits"] is True
    assert result.data["kl"]["max"] == 0.0
    assert result.data["perplexity"]["ratio"] == 1.0
    assert result.data["greedy"]["identical"] == result.data["greedy"]["prompts"] == 8
    assert result.data["limits"]["identical_greedy"] is True
    assert result.data["source"]["fp4_layers"] == result.data["target"]["fp4_layers"] == 14
    assert result.data["target"]["unused_tensors"] == []
    assert seen[-1][0] == seen[-1][1] == 512 + 8 * 64
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_one_lossy_block_of_gpt_oss_shows_in_the_logits(golden, text):
    """The golden's cast lost 4.4e-11 in one block, outside E4M3's window: the reference path shows even that."""
    source, output = golden("_src_gptoss_mxfp4"), golden("gptoss_nvfp4_cast")
    assert not torch.equal(logits(source), logits(output))
    result, _ = judge(source, output, text)
    assert result.status is Status.PASSED
    assert result.data["source"]["fp4_layers"] == result.data["target"]["fp4_layers"] == 2
    assert result.data["kl"]["max"] < 1e-9


def test_a_conversion_called_lossless_that_is_not_fails(golden, text):
    result, _ = judge(golden("_src_gptoss_mxfp4"), golden("gptoss_nvfp4_requant"), text, lossless=True)
    assert result.status is Status.FAILED
    assert {finding.rule for finding in result.errors} >= {"kl-over-bound", "logits-differ"}
    assert result.data["kl"]["mean"] > 0


@pytest.mark.parametrize(
    ("source", "output", "packed"),
    [
        ("_src_llama_bf16", "llama_nvfp4_kvfp8", 73728),
        ("_src_llama_bf16", "llama_mxfp4", 73728),
        ("_src_llama_bf16", "llama_mixed_fp8attn_nvfp4mlp", 49152),
        ("_src_qwen3moe_bf16", "qwen3moe_nvfp4_experts", 36864),
    ],
)
def test_rounded_models_of_every_layout_are_close_and_not_equal(golden, text, source, output, packed):
    result, _ = judge(golden(source), golden(output), text)
    assert result.status is Status.PASSED, result.reason
    assert result.data["target"]["packed_weights"] == packed
    assert 0 < result.data["kl"]["mean"] < 0.01  # random tiny models: their distributions are all but flat
    assert result.data["limits"]["origin"].startswith("default for a conversion to nvfp4")


def test_one_wrong_layer_is_caught(golden, text):
    source, output = golden("_src_llama_bf16"), golden("llama_nvfp4_kvfp8")
    good, _ = judge(source, output, text)
    tensors = load_file(output / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale_2"] = tensors["model.layers.1.mlp.down_proj.weight_scale_2"] * 64
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    bad, _ = judge(source, output, text, max_kl=2 * good.data["kl"]["mean"])
    assert bad.status is Status.FAILED
    assert "kl-over-bound" in {finding.rule for finding in bad.errors}


def test_bounds_of_the_manifest_win_and_null_judges_nobody(golden, text):
    source, output = golden("_src_llama_bf16"), golden("llama_mxfp4")
    strict, _ = judge(source, output, text, max_kl=1e-9, max_ppl_ratio=2.0)
    assert strict.status is Status.FAILED
    assert strict.data["limits"]["origin"] == "manifest"
    free, _ = judge(source, output, text, max_kl=None, max_ppl_ratio=None)
    assert free.status is Status.PASSED
    assert "no bounds" in free.reason


def test_w4a4_rounds_activations_by_the_static_scales(golden):
    folder = golden("llama_nvfp4_kvfp8")
    plain, rounded = logits(folder), logits(folder, w4a4=True)
    difference = (plain - rounded).norm() / plain.norm()
    assert 0.001 < difference < 0.2
    assert torch.equal(logits(golden("llama_mxfp4")), logits(folder.parent / "llama_mxfp4", w4a4=True))  # no scales


def test_chat_models_are_asked_questions(golden, text, tmp_path):
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Who?\nWhere, and when?\n\n")
    source = golden("_src_llama_bf16", chat_template=template)
    output = golden("llama_mxfp4", chat_template=template)
    result, _ = judge(source, output, text, prompts=str(prompts))
    assert result.data["greedy"]["of"] == "chat prompts"
    assert result.data["greedy"]["prompts"] == 2
    assert result.data["answers"]["tokens"] == 2 * 64


def continued(models, prompts, steps=16):
    from requant.validate.generation import along_answers, batch_of

    return list(along_answers(models, batch_of(prompts, 0), steps))


def test_padding_on_the_left_changes_no_answer(golden):
    model = load_model(golden("_src_llama_bf16")).model
    prompts = [[5, 6, 7], list(range(20, 50))]
    together = torch.stack([chosen for chosen, _ in continued([model], prompts)], 1)
    alone = [torch.cat([chosen for chosen, _ in continued([model], [prompt])]) for prompt in prompts]
    assert torch.equal(together, torch.stack(alone))


def test_answers_are_the_sources_and_the_first_difference_is_that_of_free_continuations(golden):
    """The target is led along the source's answer: up to their first difference that is its own continuation."""
    source, target = (load_model(golden(name)).model for name in ("_src_llama_bf16", "llama_mxfp4"))
    prompts = [list(range(1 + p, 30 + p)) for p in range(0, 80, 10)]
    both = continued([source, target], prompts)
    free = [torch.stack([chosen for chosen, _ in continued([m], prompts)], 1) for m in (source, target)]
    assert torch.equal(torch.stack([chosen for chosen, _ in both], 1), free[0])
    led = torch.stack([logits[1].argmax(-1) for _, logits in both], 1)
    assert not torch.equal(led, free[0])
    for row in range(len(prompts)):
        differs, differs_led = free[1][row] != free[0][row], led[row] != free[0][row]
        assert bool(differs.any()) == bool(differs_led.any())
        assert int(differs.int().argmax()) == int(differs_led.int().argmax())


class Cramped:
    """A model that runs out of memory above so many tokens in one pass."""

    def __init__(self, model, most):
        self._model, self._most, self.seen = model, most, []

    def __call__(self, *, input_ids, **options):
        self.seen.append(tuple(input_ids.shape))
        if input_ids.numel() > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self._model(input_ids=input_ids, **options)

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.fixture
def cramped(monkeypatch):
    from dataclasses import replace

    from requant.validate import load_model as module

    real = module.load_model

    def of(most):
        def loaded(*arguments, **options):
            one = real(*arguments, **options)
            return replace(one, model=Cramped(one.model, most))

        monkeypatch.setattr(module, "load_model", loaded)

    return of


def test_without_memory_stretches_get_shorter_and_prompts_fewer_and_the_report_says_so(golden, text, cramped):
    from requant.validate.report_tables import tables_of
    from requant.validate.verdict import SignOff

    source, output = golden("_src_llama_bf16"), golden("llama_mxfp4")
    cramped(100)
    result, seen = judge(source, output, text, sequence_length=128)
    assert result.status is Status.PASSED, result.reason
    assert [finding.rule for finding in result.warnings] == ["out-of-memory"] * 2
    assert "a stretch of 128 tokens: stretches of 64 were scored" in result.warnings[0].message
    assert "4 prompts at a time: 2 were continued" in result.warnings[1].message
    assert result.data["sequence_length"] == 64
    assert result.data["tokens"] == 512
    assert result.data["complete"] is True
    assert result.data["greedy"]["prompts"] == 4
    assert len(result.data["reduced"]) == 2
    assert seen[-1][0] == seen[-1][1]
    shown = tables_of(SignOff("m", "now", (), (result,), (), {}, {}))
    assert any("stretches of 64 were scored" in table.note for table in shown)


def test_memory_for_nothing_at_all_is_not_run_and_says_so(golden, text, cramped):
    cramped(10)
    result, _ = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text)
    assert result.status is Status.NOT_RUN
    assert "memory does not suffice, even for one short stretch" in result.reason
    assert result.data["complete"] is False


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: rewrite(f, model_type="no_such_model"), "cannot build this model"),
        (lambda f: rewrite(f, num_hidden_layers=3), "9 weights that the checkpoint lacks: model.layers.2"),
        (lambda f: rewrite(f, intermediate_size=64), "shape"),
        (lambda f: rewrite(f, max_position_embeddings=32), "64 tokens in a row (sequence_length), the model takes 32"),
        (lambda f: rewrite(f, max_position_embeddings=90), "96 tokens in a row (the longest prompt and greedy_steps)"),
    ],
)
def test_what_cannot_be_judged_is_not_run_with_its_reason(golden, text, break_it, reason):
    source, output = golden("_src_llama_bf16"), golden("llama_nvfp4_kvfp8")
    break_it(output)
    result, _ = judge(source, output, text)
    assert result.status is Status.NOT_RUN
    assert reason in result.reason


def rewrite(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_short_text_is_scored_whole_with_a_warning_and_a_tiny_one_not_at_all(golden, tmp_path):
    source, output = golden("_src_llama_bf16"), golden("llama_mxfp4")
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh" * 25)
    result, _ = judge(source, output, str(short))
    assert [finding.rule for finding in result.warnings] == ["text-short"]
    assert result.data["tokens"] == 192  # three stretches of 64
    short.write_text("abcdefgh" * 16)
    result, _ = judge(source, output, str(short))
    assert result.status is Status.NOT_RUN
    assert "128 tokens" in result.reason


def test_what_was_measured_before_a_break_is_kept(golden, text, monkeypatch):
    def broken(*_args, **_options):
        raise MemoryError

    monkeypatch.setattr("requant.validate.model_measure.along_answers", broken)
    result, _ = judge(golden("_src_llama_bf16"), golden("llama_mxfp4"), text)
    assert result.status is Status.NOT_RUN
    assert result.data["complete"] is False
    assert result.data["tokens"] == 512
    assert result.data["kl"]["mean"] > 0
    assert "MemoryError" in result.reason


def test_smoothed_weights_are_refused(golden):
    with pytest.raises(ModelUnavailableError, match="pre_quant_scale"):
        load_model(golden("llama_nvfp4_awq_lite"))


def test_a_sign_off_whose_model_stage_did_not_run_says_why_and_ends_with_5(golden, text, tmp_path, capsys):
    from requant.convert.cli import main

    source, out = golden("_src_llama_bf16"), tmp_path / "out"
    path = tmp_path / "m.yaml"
    path.write_text(
        f"version: 1\nname: m\nsource: {{path: {source}}}\ntarget: {{format: nvfp4, output: {out}}}\n"
        "layers:\n  - {match: 'model.layers.*_proj', to: nvfp4, scale: nearest}\n  - {match: '*', to: keep}\n"
        f"validate: {{model: {{text: {text}, tokens: 256, sequence_length: 64}}}}\n"
    )
    (source / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as stop:
        main([str(path), "--quiet"])
    shown = capsys.readouterr()
    assert stop.value.code == 5
    assert "Not signed off: model not run" in shown.out
    assert "the folder has no tokenizer that transformers can load" in shown.out
    assert "converted, but not signed off" in shown.err
    signed = json.loads((out / "requant.signoff.json").read_text())
    gate = next(gate for gate in signed["gates"] if gate["gate"] == "model")
    assert (signed["signed_off"], gate["status"]) == (False, "not run")
