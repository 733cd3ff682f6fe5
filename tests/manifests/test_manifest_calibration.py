"""Rules that rest on a calibration: told where there is none, allowed where the format itself needs no scales."""

import pytest
from requant.manifests.errors import ManifestError
from requant.manifests.load import load_manifest

TEXT = """
version: 1
name: m
source: {path: in}
target: {format: FORMAT, LAYOUT output: out}
layers:
  - {match: "*_proj", RULE}
  - {match: "*", to: keep}
"""


@pytest.fixture
def load(tmp_path):
    def made(rule, target="nvfp4", extra=""):
        layout = "layout: compressed-tensors," if target == "mxfp4" else ""
        path = tmp_path / "m.yaml"
        text = TEXT.replace("FORMAT", target).replace("LAYOUT", layout).replace("RULE", rule)
        path.write_text(text + extra)
        return load_manifest(path).manifest

    return made


CALIBRATE = "activations: {calibrate: {text: t.txt}}\n"


@pytest.mark.parametrize(
    ("rule", "target"),
    [
        ("to: nvfp4, scale: weighted", "nvfp4"),
        ("to: nvfp4, scale: weighted", "nvfp4-w4a16"),
        ("to: nvfp4, scale: mse, rounding: gptq", "nvfp4"),
        ("to: mxfp4, rounding: gptq", "mxfp4"),
    ],
)
def test_a_calibration_is_needed_and_enough(load, rule, target):
    with pytest.raises(ManifestError, match=r"needs activations\.calibrate"):
        load(rule, target)
    made = load(rule, target, CALIBRATE)
    assert made.layers[0].needs_calibration
    assert made.activations.input_scale is None
    assert (made.activations.calibrate.samples, made.activations.calibrate.sequence_length) == (512, 512)


def test_a_calibration_that_nothing_needs_is_refused_where_there_are_no_scales(load):
    with pytest.raises(ManifestError, match="has no activation scales; delete calibrate"):
        load("to: mxfp4", "mxfp4", CALIBRATE)
    assert load("to: nvfp4, scale: mse", "nvfp4", CALIBRATE).layers[0].needs_calibration is False


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ("to: nvfp4, rounding: gptq", "scale: lossless"),
        ("to: keep, rounding: gptq", "to: keep"),
        ("to: fp8, rounding: gptq", "to: fp8"),
        ("to: mxfp4, scale: weighted", "scale: weighted has no meaning with to: mxfp4"),
    ],
)
def test_what_has_no_meaning_is_refused(load, rule, what):
    with pytest.raises(ManifestError, match=what):
        load(rule, "fp8" if "fp8" in rule else "mxfp4" if "mxfp4" in rule else "nvfp4", CALIBRATE)
