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
