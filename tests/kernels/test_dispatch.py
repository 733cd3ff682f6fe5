"""Which path is chosen on which chip, and that nothing is chosen in silence."""

import pytest
import torch
from requant.kernels import availability, dispatch
from requant.kernels.availability import Availability, KernelUnavailableError, State
from requant.kernels.dispatch import Path, choose, paths
from requant.kernels.formats import NumberFormat

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
RUNS = Availability(State.RUNS, "here")


@pytest.fixture
def chip(monkeypatch):
    """chip((12, 0), but=[...]): a machine with that GPU on which every path runs but those named."""

    def set_up(capability, but=()):
        name = f"Card (SM{capability[0]}{capability[1]})"
        monkeypatch.setattr(availability, "gpu", lambda: (name, capability))
        states = {p: Availability(State.UNAVAILABLE, "it is broken") if p in but else RUNS for p in Path}
        monkeypatch.setattr(dispatch, "_AVAILABILITY", {p: (lambda s=state: s) for p, state in states.items()})

    return set_up


def pick(fmt=NVFP4, n=4096, k=4096, path="auto", **more):
    return choose(path, fmt, n, k, on_gpu=more.pop("on_gpu", True), **more)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((12, 0), Path.W4A4),
        ((12, 1), Path.W4A4),
        ((10, 0), Path.SCALED_MM),
        ((10, 3), Path.SCALED_MM),
        ((9, 0), Path.W4A16),
        ((8, 9), Path.W4A16),
        ((8, 0), Path.W4A16),
    ],
)
def test_auto_goes_by_chip(chip, capability, expected):
    chip(capability)
    choice = pick()
    assert choice.path is expected
    assert choice.kernel == expected.kernel
    assert choice.chip == f"Card (SM{capability[0]}{capability[1]})"
    assert choice.reason.startswith("the first path for Card")


def test_what_was_passed_over_is_said(chip):
    chip((10, 0), but=[Path.DOT_SCALED])
    choice = pick(fmt=MXFP4)
    assert choice.path is Path.W4A16
    assert "scaled_mm: cuBLASLt's block scales are NVFP4's, not mxfp4's" in choice.reason
    assert "dot_scaled: it is broken" in choice.reason


def test_scaled_mm_is_not_given_shapes_that_it_refuses(chip):
    chip((10, 0))
    assert pick(n=4104).path is Path.DOT_SCALED
    assert pick(k=4112).path is Path.DOT_SCALED
    with pytest.raises(KernelUnavailableError, match=r"needs K % 32 = 0 and N % 16 = 0, not 4104 x 4096"):
        pick(n=4104, path="scaled_mm")


def test_a_w4a16_checkpoint_keeps_its_activations(chip):
    chip((12, 0))
    choice = pick(activations="bf16")
    assert choice.path is Path.W4A16
    assert "w4a4 rounds activations" in choice.reason


def test_experts_go_to_paths_with_a_grouped_form(chip):
    chip((10, 0))
    assert pick(grouped=True).path is Path.W4A16
    chip((12, 0))
    assert pick(grouped=True).path is Path.W4A4
    chip((9, 0), but=[Path.W4A16])
    assert pick().path is Path.W4A16_TRITON
    assert pick(grouped=True).path is Path.W4A16_TRITON
    chip((10, 0), but=[Path.W4A16, Path.W4A16_TRITON])
    with pytest.raises(KernelUnavailableError, match="dot_scaled: it has no grouped form"):
        pick(grouped=True)


def test_no_path_is_an_error_that_names_them_all(chip):
    chip((9, 0), but=[Path.W4A16, Path.W4A16_TRITON])
    with pytest.raises(KernelUnavailableError, match=r"w4a16: it is broken; w4a16-triton: it is broken"):
        pick()
    chip((7, 5))
    with pytest.raises(KernelUnavailableError, match="SM80 or later is needed"):
        pick()


def test_a_named_path_runs_or_is_refused_never_replaced(chip):
    chip((9, 0), but=[Path.W4A4])
    with pytest.raises(KernelUnavailableError, match="path w4a4 is unavailable because it is broken"):
        pick(path="w4a4")
    assert pick(path="w4a16-triton").reason == "asked for by name"
    with pytest.raises(ValueError, match="no path is called 'w4a5'"):
        pick(path="w4a5")


def test_emulation_and_the_oracle_are_never_chosen_by_themselves(chip):
    chip((9, 0), but=[Path.W4A16, Path.W4A16_TRITON, Path.W4A4])
    with pytest.raises(KernelUnavailableError):
        pick()
    assert pick(path="w4a4-emulated").path is Path.W4A4_EMULATED
    assert pick(on_gpu=False).path is Path.CPU
    assert pick(on_gpu=False, path="reference").path is Path.REFERENCE


def test_operands_on_the_wrong_side(chip):
    chip((9, 0))
    with pytest.raises(ValueError, match="path cpu takes numpy arrays, not tensors on a GPU"):
        pick(path="cpu")
    with pytest.raises(ValueError, match="path w4a16 takes tensors on a GPU, not arrays on the CPU"):
        pick(path="w4a16", on_gpu=False)
    chip((9, 0), but=[Path.W4A16])
    with pytest.raises(KernelUnavailableError, match="path w4a16 is unavailable because it is broken"):
        pick(path="w4a16", on_gpu=False)


def test_what_only_compiles_is_said_so(chip, monkeypatch):
    chip((9, 0))
    compiles = Availability(State.COMPILES, "for SM120 by nvcc; Card has no FP4 mma")
    monkeypatch.setitem(dispatch._AVAILABILITY, Path.W4A4, lambda: compiles)
    with pytest.raises(
        KernelUnavailableError, match="w4a4 compiles here, but does not run: for SM120 by nvcc; Card has"
    ):
        pick(path="w4a4")
    monkeypatch.setattr(availability, "gpu", lambda: ("there is no GPU", None))
    with pytest.raises(KernelUnavailableError, match=r"^no GPU path runs here: there is no GPU$"):
        pick()


@pytest.mark.parametrize("nvcc", [None, "/opt/nvcc"])
def test_emulation_says_what_it_needs(monkeypatch, nvcc):
    from requant.kernels import cuda_build

    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: nvcc)
    state = dispatch._AVAILABILITY[Path.W4A4_EMULATED]
    for name, capability, said in (
        ("there is no GPU", None, "there is no GPU"),
        ("Card (SM75)", (7, 5), "Card (SM75) is older than SM80"),
    ):
        monkeypatch.setattr(availability, "gpu", lambda found=(name, capability): found)
        expected = (
            f"compiles: for SM80 and later by {nvcc}; {said}" if nvcc else f"unavailable because {said} and no nvcc"
        )
        assert str(state()) == expected
    monkeypatch.setattr(availability, "gpu", lambda: ("Card (SM90)", (9, 0)))
    assert state().state is (State.RUNS if nvcc else State.UNAVAILABLE)


def test_every_path_is_listed_with_its_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listed = {state.path: state for state in paths()}
    assert list(listed) == list(Path)
    assert {path for path, state in listed.items() if state.runs} == {Path.CPU, Path.REFERENCE}
    for path, state in listed.items():
        assert state.availability.reason, path
        if path.on_gpu:
            assert state.availability.state in (State.COMPILES, State.UNAVAILABLE)


def test_doctor_lists_every_path_and_why():
    from requant.convert.doctor import diagnose, doctor_text

    facts = diagnose()
    assert [row["path"] for row in facts["kernel_paths"]] == [*(p.value for p in Path), "gpu-quantize"]
    assert all(row["reason"] for row in facts["kernel_paths"])
    text = doctor_text(facts)
    assert all(path.value in text for path in Path)
