"""The built-in manifests and the examples say what formats and producers need, and init writes what loads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from requant.manifests.load import LIBRARY, library_names, load_manifest
from requant.manifests.match import compile_match
from requant.manifests.render import CommentedRule, render_manifest
from requant.manifests.schema import LayerRule, Manifest

EXAMPLES = LIBRARY.parent / "examples"

# Module names as the published checkpoints have them, and what must become of each.
DEEPSEEK = {
    "layers.0.ffn.experts.0.w1": "nvfp4",
    "layers.42.ffn.experts.255.w2": "nvfp4",
    "layers.3.ffn.experts.9.w3": "nvfp4",
    "layers.0.ffn.shared_experts.w1": "keep",
    "layers.0.ffn.gate": "keep",
    "layers.0.attn.wq_a": "keep",
    "mtp.0.ffn.experts.0.w1": "keep",
    "mtp.0.ffn.shared_experts.w1": "keep",
    "embed": "keep",
    "head": "keep",
}
GPT_OSS = {
    "model.layers.0.mlp.experts.gate_up_proj": "nvfp4",
    "model.layers.35.mlp.experts.down_proj": "nvfp4",
    "model.layers.0.mlp.experts.31.gate_proj": "nvfp4",
    "model.layers.0.mlp.router": "keep",
    "model.layers.0.self_attn.q_proj": "keep",
    "model.embed_tokens": "keep",
    "lm_head": "keep",
}
KIMI = {
    "language_model.model.layers.1.block_sparse_moe.experts.0.w1": "nvfp4",
    "language_model.model.layers.92.block_sparse_moe.experts.895.w2": "nvfp4",
    "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj": "keep",
    "language_model.model.layers.1.block_sparse_moe.gate": "keep",
    "language_model.model.layers.0.mlp.gate_proj": "keep",
    "language_model.model.layers.1.self_attn.q_proj": "keep",
    "language_model.lm_head": "keep",
    "vision_tower.encoder.blocks.0.mlp.fc0": "keep",
    "mm_projector.proj.0": "keep",
}
# name: source repository, source layout, target layout, runtimes, what must become of which module
LIBRARY_FACTS = {
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash", "deepseek-v4", "modelopt", ("sglang", "vllm"), DEEPSEEK),
    "deepseek-v4-pro": ("deepseek-ai/DeepSeek-V4-Pro", "deepseek-v4", "modelopt", ("sglang", "vllm"), DEEPSEEK),
    "gpt-oss-20b": ("openai/gpt-oss-20b", "gpt-oss", "modelopt", (), GPT_OSS),
    "gpt-oss-120b": ("openai/gpt-oss-120b", "gpt-oss", "modelopt", (), GPT_OSS),
    "kimi-k3": ("moonshotai/Kimi-K3", "compressed-tensors", "modelopt", (), KIMI),
}


def decide(manifest, name):
    """What the first rule that matches makes of a module."""
    return next(rule.to for rule in manifest.layers if compile_match(rule.match)(name))


def test_the_library_holds_what_it_promises():
    assert library_names() == tuple(sorted(LIBRARY_FACTS))


@pytest.mark.parametrize("name", sorted(LIBRARY_FACTS))
def test_a_built_in_manifest_converts_the_experts_and_nothing_else(name):
    manifest = load_manifest(name, environ={}).manifest
    repo, source_layout, target_layout, runtimes, modules = LIBRARY_FACTS[name]
    assert (manifest.source.repo, manifest.source.layout) == (repo, source_layout)
    assert (manifest.target.format, manifest.target.layout) == ("nvfp4", target_layout)
    assert manifest.target.runtimes == runtimes
    assert manifest.activations.input_scale == 1.0
    assert {module: decide(manifest, module) for module in modules} == modules
    assert [rule.scale for rule in manifest.layers if rule.to == "nvfp4"] == ["lossless"]
    assert [rule.optional for rule in manifest.layers] == [False, False]


@pytest.mark.parametrize("name", sorted(LIBRARY_FACTS))
def test_a_built_in_manifest_demands_losslessness_where_it_is_possible(name):
    gate = load_manifest(name, environ={}).manifest.validation.numerics
    if name == "gpt-oss-120b":  # 67 of its 72 expert tensors are exact
        assert (gate.lossless, gate.max_lossy_tensors, gate.required) == ("report", 5, True)
        assert gate.min_sqnr_db >= 60
    else:
        assert (gate.lossless, gate.max_lossy_tensors, gate.required) == ("required", None, True)


@pytest.mark.parametrize("name", sorted(LIBRARY_FACTS))
def test_the_command_lines_in_a_built_in_manifest_work(name):
    text = (LIBRARY / f"{name}.yaml").read_text()
    commands = re.findall(r"^#   ((?:convert|requant \w+) .*?)(?:\s{2,}#.*)?$", text, re.MULTILINE)
    assert len(commands) >= 2
    for command in commands:
        words = command.split()
        assert name in words
        load_manifest(name, [words[i + 1] for i, word in enumerate(words) if word == "--set"], environ={})


@pytest.mark.parametrize("name", sorted(LIBRARY_FACTS))
def test_a_copy_on_disk_and_another_output_folder_are_one_setting_away(name):
    manifest = load_manifest(name, ["source.path=/m"], environ={"REQUANT_OUT": "/big"}).manifest
    assert (manifest.source.path, manifest.source.repo) == ("/m", None)
    assert manifest.target.output.startswith("/big/")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads(path):
    loaded = load_manifest(path, environ={})
    again = load_manifest_text(loaded.resolved_yaml)
    assert again == loaded.manifest


def load_manifest_text(text):
    """The manifest of a text, through a file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.yaml"
        path.write_text(text)
        return load_manifest(path, environ={}).manifest


def test_the_promised_examples_exist():
    names = {path.stem for path in EXAMPLES.glob("*.yaml")}
    assert names >= {"minimal", "full", "bf16-to-mxfp4", "w4a16", "dense-compressed-tensors", "gpt-oss-20b-out-head"}


def test_the_full_example_shows_every_key_with_a_comment():
    text = (EXAMPLES / "full.yaml").read_text()
    shown = set(re.findall(r"^ *(?:- )?([a-z_0-9]+):", text, re.MULTILINE))

    def keys(model):
        for name, info in model.model_fields.items():
            yield info.alias or name
            for part in [info.annotation, *getattr(info.annotation, "__args__", ())]:
                inner = [part, *getattr(part, "__args__", ())]
                for kind in inner:
                    if hasattr(kind, "model_fields"):
                        yield from keys(kind)

    inline = {"path", "from", "text", "samples", "sequence_length"}  # alternatives, shown in a comment
    assert set(keys(Manifest)) - shown - inline == set()
    assert all(f"{key}:" in text for key in inline)


def test_init_writes_a_manifest_that_loads_to_what_was_asked():
    rules = [
        CommentedRule(LayerRule(match=r"re:layers\.\d+\.it's", to="nvfp4"), "the experts,\nall of them"),
        CommentedRule(LayerRule(match="mtp.*", to="keep", optional=True)),
        CommentedRule(LayerRule(match="*", to="keep")),
    ]
    text = render_manifest(
        "no",
        layout="deepseek-v4",
        rules=rules,
        path="/m/${x} #1",
        runtimes=["vllm", "sglang"],
        why="recognised by: expert_dtype fp4",
        shard_size=512 * 2**20,
    )
    manifest = load_manifest_text(text)
    assert (manifest.name, manifest.source.path, manifest.source.layout) == ("no", "/m/${x} #1", "deepseek-v4")
    assert manifest.layers == tuple(entry.rule for entry in rules)
    assert (manifest.target.runtimes, manifest.target.shard_size) == (("vllm", "sglang"), 512 * 2**20)
    assert (manifest.target.output, manifest.validation.numerics.lossless) == ("out/no", "required")
    assert text.startswith("# recognised by: expert_dtype fp4\nversion: 1\n")
    assert "  # the experts,\n  # all of them\n  - {match:" in text


@pytest.mark.parametrize("kind", ["nvfp4-w4a16", "mxfp4", "fp8", "bf16"])
def test_init_writes_activation_scales_only_where_the_format_has_them(kind):
    rule = LayerRule(match="*", to=kind.removesuffix("-w4a16"))
    text = render_manifest("m", layout="auto", rules=[CommentedRule(rule)], repo="a/b", target_format=kind)
    manifest = load_manifest_text(text)
    assert (manifest.target.format, manifest.layers) == (kind, (rule,))
    assert manifest.activations.input_scale == (1.0 if kind == "fp8" else None)
    rounds = rule.scale != "lossless"
    assert (manifest.validation.numerics.min_sqnr_db is not None) == rounds


def test_init_refuses_to_write_what_cannot_load():
    rule = CommentedRule(LayerRule(match="*", to="nvfp4"))
    with pytest.raises(ValueError, match="exactly one of repo and path"):
        render_manifest("m", layout="auto", rules=[rule])
    with pytest.raises(ValueError, match="at least one rule"):
        render_manifest("m", layout="auto", rules=[], path="a")


def test_reading_a_manifest_imports_nothing_heavy():
    code = (
        "import sys; from requant.manifests.load import load_manifest; load_manifest('kimi-k3', environ={});"
        "print([name for name in ('torch', 'numpy', 'numba', 'safetensors', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
