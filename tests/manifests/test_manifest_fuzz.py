"""Whatever stands in a file or in `--set`: a manifest, or one ManifestError with a place. Never another exception."""

# ruff: noqa: E501  the table of pieces
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from requant.manifests.errors import ManifestError
from requant.manifests.load import LIBRARY, load_manifest

FULL = re.sub(r" *#.*", "", (LIBRARY.parent / "examples" / "full.yaml").read_text())  # half the size, twice the speed
PIECES = st.one_of(
    st.sampled_from(
        ["*", "&a ", "*a", "- ", ": ", ":", "\t", "  ", "\n", "---\n", "...\n", "{", "}", "[", "]", "'", '"', "\\", "!", "!!int ",
         "<<: ", "? ", "| ", ">\n", "#", "%", "@", "${", "${env:A}", "${env:", "~", "null", "yes", "010", "1e-3", ".nan", "1:2",
         "\r", "\x85", "\u2028", "\ufeff", "\0", "é", "0: ", "layers: ", "-1", "99999999999999999999"]
    ),
    st.text(max_size=3),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**20), 10**20),
        st.floats(),
        st.sampled_from(["nvfp4", "keep", "*", "re:(", "a/b", "5GB", "auto", ""]),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(re.findall(r"([a-z_]+):", FULL)), inner, max_size=3),
    ),
    max_leaves=8,
)
SECTIONS = ["version", "name", "include", "source", "target", "layers", "activations", "execute", "validate", "publish"]


def load(tmp_path_factory, text, sets=()):
    """Loads a text; returns the error's text, or none."""
    path = tmp_path_factory.mktemp("m") / "m.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = load_manifest(path, sets, environ={})
    except ManifestError as error:
        return str(error)
    path.write_text(loaded.resolved_yaml)
    assert load_manifest(path, environ={}).manifest == loaded.manifest
    return ""


def check(told):
    """An error names at least one place, and each place is one that a file can have."""
    if told:
        places = re.findall(r"^(?:/.*m\.yaml|--set|/.*\.yaml):(\d+):(\d+): .", told, re.MULTILINE)
        assert places, told
        assert all(int(line) >= 1 and int(column) >= 1 for line, column in places)


@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 6), PIECES), min_size=1, max_size=3))
@settings(max_examples=100)
def test_a_damaged_manifest_is_told_and_not_crashed_on(tmp_path_factory, edits):
    text = FULL
    for at, cut, piece in edits:
        text = text[:at] + piece + text[at + cut :]
    check(load(tmp_path_factory, text))


@given(st.dictionaries(st.sampled_from(SECTIONS), VALUES, max_size=4))
@settings(max_examples=100)
@example({"source": {"path": {}}, "activations": {"input_scale": {"from": []}}})
@example({"target": {"format": []}, "layers": [{"to": []}]})
@example({"layers": [[]], "validate": {"serving": {"endpoint": {}}}})
def test_values_of_any_kind_in_any_section_are_told(tmp_path_factory, sections):
    sets = [f"{key}={flow(value)}" for key, value in sections.items()]
    check(load(tmp_path_factory, FULL, sets))


def flow(value):
    """A value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, float)
        else repr(value)
    )


@example("\n=*0")
@given(st.text("abclayers.0123=*[]{}:'\" -\n", max_size=20))
@settings(max_examples=100)
def test_a_setting_of_any_form_is_told(tmp_path_factory, argument):
    check(load(tmp_path_factory, FULL, [argument]))
