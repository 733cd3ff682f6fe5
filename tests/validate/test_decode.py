"""The decode engine without a GPU: fused kernels in Triton's interpreter, bytes of a step, kernels by kind, memory."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from requant.kernels import w4a16
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.manifests.gates import SpeedGate
from requant.validate import decode_speed
from requant.validate.decode_engine import Engine, make_glue
from requant.validate.decode_glue import PlainGlue
from requant.validate.decode_load import as_bf16, decoded
from requant.validate.decode_model import Attention, Decoder, Gate, Layer, Matrix, Mlp, Moe, Router
from requant.validate.decode_products import Products
from requant.validate.decode_speed import step_bytes

PROGRAM = Path(__file__).with_name("decode_fused_program.py")
BF16 = NumberFormat.BF16
HIDDEN, INNER, EXPERTS, VOCABULARY = 32, 48, 4, 50


@pytest.mark.parametrize(
    ("device", "bound"),
    [("cpu", 2e-6), pytest.param("cuda", 2**-6, marks=pytest.mark.gpu)],
)
def test_the_fused_kernels_compute_what_the_plain_glue_computes(device, bound):
    """On a CPU in FP32: the interpreter has no BF16 products."""
    run = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), device],
        env={**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    errors = [(name, float(error)) for name, error in (line.rsplit(" ", 1) for line in run.stdout.splitlines())]
    kinds = {name.split()[0] for name, _ in errors}
    glue, products = (
        {"add_norm", "embed", "choose", "pick", "gate", "attend", "prompt"},
        {"skinny", "vector", "grouped"},
    )
    assert kinds == glue | products | {"decoded"}
    assert len(errors) == 50
    assert all(error < bound for _, error in errors), errors


def matrix(rng, *shape):
    return Matrix(BF16, 2 * torch.Size(shape).numel(), torch.randn(shape, generator=rng) / shape[-1] ** 0.5)


def decoder(layers=2, window=0):
    """A mixture of experts and a dense layer in turn, FP32."""
    rng = torch.Generator().manual_seed(1)
    made = []
    for index in range(layers):
        attention = Attention(4, 2, 8, 8**-0.5, matrix(rng, 64, HIDDEN), matrix(rng, HIDDEN, 32), window=window)
        if index % 2:
            mlp = Mlp(matrix(rng, 2 * INNER, HIDDEN), matrix(rng, HIDDEN, INNER), Gate())
        else:
            router = Router(torch.randn((EXPERTS, HIDDEN), generator=rng), 2)
            mlp = Moe(router, matrix(rng, EXPERTS, 2 * INNER, HIDDEN), matrix(rng, EXPERTS, HIDDEN, INNER), Gate())
        made.append(Layer(torch.ones(HIDDEN), attention, torch.ones(HIDDEN), mlp))
    angles = torch.arange(64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    embedding = torch.randn((VOCABULARY, HIDDEN), generator=rng)
    head = matrix(rng, VOCABULARY, HIDDEN)
    return Decoder("Toy", embedding, tuple(made), torch.ones(HIDDEN), 1e-6, head, angles.cos(), angles.sin())


def test_streams_do_not_see_each_other_and_a_step_continues_a_prefill():
    model = decoder(window=5)
    prompts = [torch.arange(3, 12), torch.arange(20, 33)]
    together = Engine(model, 2, 40, Products(model)).tokens(prompts, 10, eager=True)
    for prompt, tokens in zip(prompts, together, strict=True):
        alone = Engine(model, 1, 40, Products(model))
        assert alone.tokens([prompt], 10, eager=True) == [tokens]
        for done in (3, 7):  # what was decoded, as part of the prompt
            longer = torch.cat([prompt, torch.tensor(tokens[:done])])
            assert alone.tokens([longer], 10 - done, eager=True) == [tokens[done:]]


def test_both_ways_begin_where_the_prompts_end():
    model, prompts = decoder(window=5), [torch.arange(3, 12), torch.arange(20, 33)]
    engine = Engine(model, 2, 40, Products(model))
    expected = engine.tokens(prompts, 10, eager=True)
    assert engine.tokens_both_ways(prompts, 10) == (expected, expected)
    broken = Engine(model, 2, 40, Products(model))
    real = broken.start
    broken.start = lambda stream, prompt, eager=False: real(stream, prompt if eager else prompt + 1, eager=eager)
    one, other = broken.tokens_both_ways(prompts, 10)
    assert one == expected
    assert other[0] != one[0]  # the prefill that is done again is part of what is compared
    assert other[1] == one[1]


def test_a_wave_counts_its_steps_and_tokens():
    wave = Engine(decoder(), 2, 40, Products(decoder())).wave([torch.arange(9), torch.arange(9)], 5)
    assert (wave.tokens, len(wave.step_us), len(wave.prefill_ms)) == (10, 4, 2)
    assert wave.first_ms[1] == pytest.approx(sum(wave.prefill_ms), rel=1e-6)
    assert wave.seconds * 1e3 > wave.first_ms[1] + sum(wave.step_us) / 1e3 * 0.99


def test_bytes_of_a_step_count_touched_experts_and_seen_keys():
    model = decoder(window=5)
    dense = 2 * 2 * (64 * HIDDEN + HIDDEN * 32) + 2 * VOCABULARY * HIDDEN + 2 * 3 * HIDDEN * INNER
    one_expert = 2 * 3 * HIDDEN * INNER
    small = 4 * (5 * HIDDEN + EXPERTS * HIDDEN)
    keys = 4 * 2 * 2 * 5 * 2 * 8  # FP32, two layers, k and v, a window of 5, two KV heads of 8
    row = 4 * HIDDEN
    assert step_bytes(model, 1, 2.0, 30) == dense + 2 * one_expert + small + keys + row
    assert step_bytes(model, 3, 3.5, 30) == dense + 3.5 * one_expert + small + 3 * (keys + row)
    assert step_bytes(model, 1, 2.0, 3) == dense + 2 * one_expert + small + 3 * keys / 5 + row


def test_fp4_counts_as_stored_and_bf16_as_what_it_becomes():
    codes = torch.randint(0, 256, (EXPERTS, 8, 16), dtype=torch.uint8)
    scales = torch.full((EXPERTS, 8, 2), 0x38, dtype=torch.uint8)
    scales[1] = 0x40
    packed = Fp4Tensor(NumberFormat.NVFP4, codes, scales, torch.tensor([1.0, 0.5, 2.0, 4.0]))
    plain = as_bf16(Matrix(NumberFormat.NVFP4, codes.numel() + scales.numel() + 16, packed=packed))
    assert (plain.nbytes, plain.stored, plain.experts) == (2 * EXPERTS * 8 * 32, BF16, EXPERTS)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for expert, scale in ((0, 1.0), (1, 2.0 * 0.5), (3, 4.0)):
        low = torch.tensor([table[int(c) & 15] for c in codes[expert].flatten()]).view(8, 16) * scale
        assert torch.equal(plain.plain[expert, :, ::2].float(), low)
        assert torch.equal(decoded(packed, expert)[:, ::2].float(), low)


# --- the measurement, its loader replaced -----------------------------------------------------------------------------


def measured(monkeypatch, *, gate=None, source=PROGRAM.parent, **replaced):
    monkeypatch.setattr(decode_speed, "load_decoder", lambda path, **_: decoder())
    for name, value in replaced.items():
        monkeypatch.setattr(decode_speed, name, value)
    gate = gate or SpeedGate(device="cpu", concurrency=(1, 4), requests=(2, 6), prompt_tokens=6, output_tokens=5)
    seen = []
    found = decode_speed.measure_model(
        Path("o"), source, gate, read_gbps=None, device="cpu", progress=lambda a, b: seen.append((a, b))
    )
    return found, seen


def test_each_concurrency_has_its_requests_and_the_source_stands_beside(monkeypatch):
    found, seen = measured(monkeypatch)
    assert [run["label"] for run in found.data["runs"]] == ["converted (BF16)", "source (BF16)"]
    points = found.data["runs"][0]["points"]
    assert [(p["concurrency"], p["completed"], p["batch"]) for p in points] == [(1, 2, 1), (4, 8, 4)]
    for p in points:
        assert p["stream_tokens_per_s"] == pytest.approx(1e6 / p["step_us_median"], rel=1e-3)
        assert p["decode_tokens_per_s"] == pytest.approx(p["concurrency"] * 1e6 / p["step_us_median"], rel=1e-3)
        assert 0 < p["ttft_ms_median"] <= p["ttft_ms_p95"]
        assert "of_roofline" not in p
    assert set(found.speedups("source")) == {1, 4}
    assert not found.findings
    # Of each run load and prefill; at each concurrency products, reference, capture, tokens both ways, and two waves.
    assert seen == [(done, 48) for done in range(1, 2 * (2 + 2 * (4 + 2)) + 1)]
    assert set(found.data["seconds"]) >= {"load", "reference", "choosing products", "capture", "waves"}


def test_too_little_memory_is_a_smaller_batch_and_said(monkeypatch):
    class Small(Engine):
        def capture(self, prompt_tokens=0):
            if self.streams > 2:
                time.sleep(0.05)
                raise torch.OutOfMemoryError

    found, _ = measured(monkeypatch, Engine=Small)
    assert [p["batch"] for p in found.runs["converted"]] == [1, 2]
    assert found.findings[0].message == "4 streams do not fit into the GPU's memory: measured with 2"
    assert found.data["seconds"]["capture"] >= 0.1, "of the two that broke off"


def test_a_graph_that_decodes_other_tokens_is_an_error(monkeypatch):
    class Wrong(Engine):
        def step(self, *, eager=False):
            super().step(eager=eager)
            self.state.tokens.add_(not eager).remainder_(VOCABULARY)

    found, _ = measured(monkeypatch, Engine=Wrong)
    assert {f.rule for f in found.findings if f.severity == "error"} == {"graph-differs"}


def test_a_source_that_cannot_run_is_named_and_the_rest_kept(monkeypatch):
    from requant.kernels.empty_model import ModelUnavailableError

    def load(path, **_):
        if path != Path("o"):
            raise ModelUnavailableError("x is fp8: the decode engine reads FP4 and BF16")
        return decoder()

    gate = SpeedGate(device="cpu", concurrency=(1,), requests=(1,), prompt_tokens=4, output_tokens=3)
    monkeypatch.setattr(decode_speed, "load_decoder", load)
    found = decode_speed.measure_model(Path("o"), PROGRAM.parent, gate, read_gbps=None, device="cpu")
    assert found.missing == {"source": "x is fp8: the decode engine reads FP4 and BF16"}
    assert found.data["not_measured"] == found.missing
    assert found.speedups("source") == {}
    found, _ = measured(monkeypatch, gate=gate, source=Path("absent"))
    assert found.missing == {"source": "its folder is not here"}


def test_the_stage_judges_its_bounds(monkeypatch):
    from requant.validate import speed

    run = [{"concurrency": 1, "batch": 1, "stream_tokens_per_s": 600.0, "of_roofline": 0.52, "step_us_median": 1666.0}]
    slow = [{**run[0], "step_us_median": 3000.0}]
    found = decode_speed.Measured(runs={"converted": run, "bf16": slow}, missing={"source": "it is FP8"})

    def judged(**bounds):
        findings = []
        said = speed._judge(found, SpeedGate(baseline=bounds.pop("baseline", "bf16"), **bounds), {}, findings)
        return said, [f.message for f in findings]

    assert judged(min_speedup=1.8, min_tokens_per_s=500.0, min_roofline=0.5) == ("", [])
    assert judged(min_speedup=1.9) == ("", ["at 1 streams 1.801 times the speed of bf16, under 1.9"])
    assert judged(min_roofline=0.6) == ("", ["of_roofline is 0.52 at 1 streams, under 0.6"])
    assert judged(min_tokens_per_s=601.0) == ("", ["stream_tokens_per_s is 600 at 1 streams, under 601"])
    assert judged(baseline="source", min_speedup=1.0) == ("min_speedup needs source: it is FP8", [])
    more = {**run[0], "concurrency": 16, "batch": 16}
    found.runs["converted"] = [*run, more]
    found.missing["bf16"] = "memory does not suffice for its weights and one stream"
    said = "min_speedup needs bf16 at 16 streams too: memory does not suffice for its weights and one stream"
    assert judged(min_speedup=1.5) == (said, [])
    found.runs["bf16"] = [*slow, {**more, "batch": 8, "step_us_median": 9000.0}]
    del found.missing["bf16"]
    said = "min_speedup needs bf16 at 16 streams too: the two did not decode as many streams at a time"
    assert judged(min_speedup=1.5) == (said, [])
    found.runs["bf16"][1]["batch"] = 16
    assert judged(min_speedup=1.5) == ("", [])
    found.runs["bf16"][1]["step_us_median"] = float("nan")
    assert judged(min_speedup=1.5) == ("", ["at 16 streams nan times the speed of bf16, under 1.5"])
    found.runs["converted"] = [{**run[0], "concurrency": 8, "batch": 4}]
    said = "min_tokens_per_s is of 8 streams, and memory sufficed for 4 at a time"
    assert judged(min_tokens_per_s=1.0) == (said, [])
    found.runs["converted"] = run
    del run[0]["of_roofline"]
    assert judged(min_roofline=0.1) == ("min_roofline needs a GPU", [])


@pytest.mark.parametrize("triton", [False, True])
def test_slots_are_sorted_for_the_kernel_that_reads_them(monkeypatch, triton):
    made = []
    monkeypatch.setitem(
        sys.modules, "requant.validate.decode_fused", SimpleNamespace(FusedGlue=lambda **k: made.append(k))
    )
    monkeypatch.setattr(w4a16, "uses_triton", lambda: triton)
    make_glue(SimpleNamespace(embedding=SimpleNamespace(is_cuda=True)), pdl=False)
    assert made == [{"pdl": False, "routes": not triton}]


def test_what_was_measured_before_a_run_broke_off_is_kept_and_nothing_of_it_passes(monkeypatch):
    from requant.validate import speed

    class Breaks(Engine):
        def capture(self, prompt_tokens=0):
            if self.streams > 1:
                raise RuntimeError("CUDA error: an illegal address\nmore")

    gate = SpeedGate(device="cpu", concurrency=(1, 4), requests=(2, 6), prompt_tokens=6, output_tokens=5)
    found, _ = measured(monkeypatch, gate=gate, Engine=Breaks)
    said = "it broke off with RuntimeError: CUDA error: an illegal address"
    assert found.missing == {"converted": said}
    assert [p["concurrency"] for p in found.data["runs"][0]["points"]] == [1]
    data = dict(found.data)
    assert speed._judge(found, gate, data, []) == said
    assert data["not_measured"] == {"converted": said}

    def nothing(engine, prompt_tokens):
        raise torch.OutOfMemoryError

    found, _ = measured(monkeypatch, gate=gate, Engine=type("None", (Engine,), {"capture": nothing}))
    assert speed._judge(found, gate, {}, []) == "memory does not suffice for its weights and one stream"


def test_a_baseline_that_breaks_off_is_no_baseline_at_every_concurrency(monkeypatch):
    from requant.validate import speed

    seen = []

    class Breaks(Engine):
        def capture(self, prompt_tokens=0):
            seen.append(self.streams)
            if len(seen) == 4:  # the source, at the second concurrency
                raise RuntimeError("broken")

    gate = SpeedGate(
        device="cpu", concurrency=(1, 4), requests=(2, 4), prompt_tokens=6, output_tokens=5, min_speedup=1e-6
    )
    found, _ = measured(monkeypatch, gate=gate, Engine=Breaks)
    assert set(found.speedups("source")) == {1}
    said = speed._judge(found, gate, {}, [])
    assert said == "min_speedup needs source at 4 streams too: it broke off with RuntimeError: broken"


def test_the_95th_percentile_is_the_least_value_that_95_percent_do_not_exceed():
    assert [decode_speed._p95(range(1, n + 1)) for n in (1, 8, 19, 20, 21, 60, 100, 101)] == [
        1, 8, 19, 19, 20, 57, 95, 96
    ]  # fmt: skip


@pytest.mark.parametrize("limit", [None, 7.0])
def test_gate_up_with_its_gate_in_one_launch_is_the_two_launches(monkeypatch, limit):
    """The kernel that does both is played in plain torch; down is promised a routing that is older than gate_up."""
    rng = torch.Generator().manual_seed(5)

    def fp4(experts, rows, k):
        codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=rng)
        scales = torch.full((experts, rows, k // 16), 0x30, dtype=torch.uint8)
        return Matrix(NumberFormat.NVFP4, 0, packed=Fp4Tensor(NumberFormat.NVFP4, codes, scales, torch.ones(experts)))

    calls, glue = [], PlainGlue()

    def moe(x, codes, scales, scale, *, fmt, routing, x_per_slot=False, settled=False, bias=None, activation=None):
        calls.append((activation is not None, settled))
        packed = Fp4Tensor(fmt, codes, scales, scale)
        weights = torch.stack([decoded(packed, e) for e in range(len(codes))])[routing.ids.long()].float()
        y = torch.einsum("tjk,tjnk->tjn", x if x_per_slot else x[:, None].expand(-1, weights.shape[1], -1), weights)
        if activation is None:
            return y
        return glue.gate(y, Gate(activation.interleaved, activation.limit, activation.alpha), routing.ids, bias)

    monkeypatch.setattr(w4a16, "w4a16_moe", moe)
    monkeypatch.setattr(w4a16, "route_experts", lambda ids, _: SimpleNamespace(ids=ids, triton=False))
    base = decoder()
    bias = torch.randn((EXPERTS, 2 * INNER), generator=rng)
    gate = Gate(limit is not None, limit, 1.7)
    gate_up, down = fp4(EXPERTS, 2 * INNER, HIDDEN), fp4(EXPERTS, HIDDEN, INNER)
    layers = [
        replace(a, mlp=replace(a.mlp, gate_up=gate_up, down=down, gate=gate, gate_up_bias=bias))
        if isinstance(a.mlp, Moe) else a
        for a in base.layers
    ]  # fmt: skip
    model, seen = replace(base, layers=tuple(layers)), []
    for fused in (False, True):
        monkeypatch.setattr(w4a16, "fuses", lambda *_, fused=fused, **__: fused)
        engine = Engine(model, 2, 40, Products(model), glue)
        engine.state.tokens.copy_(torch.tensor([3, 30]))
        for _ in range(5):
            engine.step()
        seen.append((engine.logits, calls[:2]))
        calls.clear()
    times = iter([9.0, 7.0, 6.0])  # of a step; with one launch for both; with two
    engine.products.refine(lambda: engine.step() or next(times))
    calls.clear()
    engine.step()
    assert calls[0] == (False, False)
    torch.testing.assert_close(seen[0][0], seen[1][0], rtol=1e-5, atol=1e-5)
    assert [made for _, made in seen] == [[(False, False), (False, True)], [(True, False), (False, True)]]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_fused_step_in_a_graph_decodes_the_plain_steps_tokens(pdl):
    from dataclasses import fields, is_dataclass, replace

    from requant.validate.decode_glue import PlainGlue

    def moved(value):
        if isinstance(value, torch.Tensor):
            return value.cuda() if value.shape == (64, 4) else value.cuda().bfloat16()
        if isinstance(value, tuple):
            return tuple(moved(v) for v in value)
        if is_dataclass(value):
            return replace(value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)})
        return value

    from requant.validate.decode_step import Cache, State, step

    model = moved(decoder(window=9))
    products = Products(model, pdl=pdl)
    logits = []
    for glue in (make_glue(model, pdl=pdl), PlainGlue()):
        cache, state = Cache.empty(model, 3, 64), State.new(model, 3)
        with torch.inference_mode():
            for _ in range(12):
                state.tokens.copy_(torch.tensor([1, 2, 3]))
                last = step(model, cache, state, glue, products)
        logits.append(last.float())
    assert (logits[0] - logits[1]).abs().max() < 0.05 * logits[1].abs().max()
    engine = Engine(model, 3, 64, products, make_glue(model, pdl=pdl))
    engine.capture(9)
    prompts = [torch.arange(9).cuda() + i for i in range(3)]
    eager = engine.tokens(prompts, 20, eager=True)
    assert engine.tokens(prompts, 20, eager=False) == eager
    assert engine.tokens_both_ways(prompts, 20) == (eager, eager)
