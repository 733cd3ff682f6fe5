"""The model card: facts of the sign-off, what carries over from the source, and no line of another's lost."""

import pytest
import yaml
from requant.convert.card import BEGIN, END

REPO = "tester/tiny-mxfp4"
PR = "refs/pr/1"
SOURCE = "upstream/tiny"


@pytest.fixture
def published(hub, kit):
    """Publish a folder converted from the Hub, over a README if one is given; the card's (metadata, text)."""

    def publish(existing=None, **more):
        hub.put_folder(SOURCE, kit.source())
        if existing is not None:
            hub.put(REPO, {"README.md": existing.encode()})
        output = kit.signed(source=SOURCE, publish={"repo": REPO})
        assert kit.requant("publish", output, "--quiet", *more.get("arguments", ())) == more.get("code", 0)
        if more.get("code"):
            return None
        card = hub.content(REPO, "README.md", PR).decode()
        _, block, text = card.split("---\n", 2)
        return yaml.safe_load(block), text

    return publish


def test_metadata_names_the_base_and_carries_the_licence(hub, published):
    metadata, text = published()
    assert metadata == {
        "license": "apache-2.0",
        "language": ["en"],
        "pipeline_tag": "text-generation",
        "base_model": SOURCE,
        "base_model_relation": "quantized",
        "library_name": "transformers",
        "tags": ["requant", "mxfp4", "compressed-tensors", "quantized"],
    }
    assert "The source's own card" not in text


def test_the_text_shows_origin_commands_gates_and_limits(hub, published):
    _, text = published()
    commit = hub.repos[SOURCE].refs["main"]
    assert text.startswith("\n# tiny-mxfp4\n")
    assert f"at commit `{commit}`, converted to MXFP4 (layout compressed-tensors) by requant 0.1.0." in text
    assert f"vllm serve {REPO}" in text
    assert "sglang" not in text
    assert "| contract | required | passed | cpu | vllm simulated: ok |" in text
    assert "| numerics | required | passed | cpu |" in text
    assert "- Loader rules of vllm were applied to the files; that is no run of these programs." in text
    assert "- Not measured: speed." in text
    assert "[requant.lock.json](requant.lock.json)" in text
    assert "Not signed off" not in text


MINE = """---
license: other
license_name: mine
tags:
- my-tag
extra_key: 7
---
# My own title

Words of mine.
"""


def test_a_card_of_the_user_keeps_every_line_and_key(published):
    metadata, text = published(MINE)
    assert text.startswith("# My own title\n\nWords of mine.\n\n" + BEGIN)
    assert metadata["license"] == "other"
    assert metadata["extra_key"] == 7
    assert metadata["tags"] == ["my-tag", "requant", "mxfp4", "compressed-tensors", "quantized"]
    assert metadata["base_model"] == SOURCE


def test_our_part_is_replaced_where_it_stands(published):
    _, text = published(f"{MINE}\n{BEGIN}\nold words\n{END}\n\nAfter it.\n")
    assert "old words" not in text
    assert text.startswith("# My own title\n\nWords of mine.\n\n" + BEGIN)
    assert text.endswith(f"{END}\n\nAfter it.\n")
    assert text.count(BEGIN) == text.count(END) == 1


@pytest.mark.parametrize(
    ("existing", "why"),
    [(f"# x\n{BEGIN}\nno end\n", "do not pair up"), ("---\na: [\n---\n# x\n", "metadata block cannot be read")],
)
def test_a_card_that_cannot_be_merged_is_left_alone(published, hub, capsys, existing, why):
    published(existing, code=7)
    assert why in capsys.readouterr().err
    assert hub.content(REPO, "README.md") == existing.encode()


def test_without_metadata_the_text_still_stays(published):
    metadata, text = published("# Just text\n")
    assert text.startswith("# Just text\n")
    assert metadata["base_model"] == SOURCE


def test_accuracy_and_speed_are_the_tables_of_the_report():
    from requant.convert.card import CardFacts, make_card
    from requant.manifests.schema import Manifest
    from requant.validate.report import markdown_table
    from requant.validate.report_tables import tables_of
    from requant.validate.results import StageResult, Status
    from requant.validate.verdict import Gate, SignOff

    model = {
        "complete": True,
        "tokens": 2048,
        "sequence_length": 512,
        "path": "GPU",
        "text": {"file": "<b>.txt"},
        "kl": {"mean": 0.25, "stderr": 0.02, "p99": 2.2},
        "top1_agreement": {"mean": 0.73, "stderr": 0.01},
        "perplexity": {"source": 4.6, "target": 5.8, "ratio": 1.26, "ratio_low": 1.2, "ratio_high": 1.3},
        "lm_eval": {
            "version": "0.4.13",
            "tasks": {"sums, acc": {"questions": 60, "source": 0.5, "target": 0.45, "difference": -0.05, "margin": 0.1,
                                    "judged": True, "verdict": "not inferior"}},
        },
    }  # fmt: skip
    point = {"concurrency": 8, "requests": 32, "completed": 32, "output_tokens_per_s": 1234.5, "ttft_ms_median": 20.0}
    serving = {"runs": [{"label": "nvfp4", "server": "vLLM 0.30.0", "card": "NVIDIA B200", "points": [point],
                         "kernels": ["MoE: CUTLASS"], "fp4_native": True}]}  # fmt: skip
    stages = (
        StageResult("model", Status.PASSED, "fine", data=model),
        StageResult("serving", Status.PASSED, "fine", data=serving),
    )
    gates = tuple(Gate(stage.stage, True, "any", Status.PASSED, "fine") for stage in stages)
    signed = SignOff("m", "now", gates, stages, (), {}, {})
    manifest = Manifest.model_validate(
        {"version": 1, "name": "m", "source": {"path": "in"}, "layers": [{"match": "*", "to": "nvfp4"}],
         "target": {"format": "nvfp4", "output": "out"}}
    )  # fmt: skip
    card = make_card(CardFacts("o/m", manifest, {}, signed, "", ()), None, None)
    headings = [line for line in card.splitlines() if line.startswith("### ")]
    assert headings[1:5] == ["### Sign-off", "### Accuracy", "### Speed", "### Limits"]
    for table in tables_of(signed)[1:]:
        for line in markdown_table(table):
            assert line in card, table.heading
    assert "| nvfp4 | 8 | 32 of 32 | 1,234.5 | 20.0 / - | - / - |" in card
    assert "| sums, acc | 60 | 0.5000 | 0.4500 | -0.0500 | -0.1 | not inferior |" in card
    assert "nvfp4: vLLM 0.30.0 on NVIDIA B200, MoE: CUTLASS (native FP4)" in card
    assert "&lt;b>.txt" in card
    assert "Not measured: FP4 kernels." in card
    assert "Not measured: accuracy" not in card
