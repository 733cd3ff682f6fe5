"""The reference of a decode step: right kernels pass, and each kind of wrong one is seen though it repeats itself."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.manifests.gates import SpeedGate
from requant.validate import decode_reference, decode_speed
from requant.validate.decode_engine import Engine
from requant.validate.decode_glue import PlainGlue
from requant.validate.decode_load import as_bf16
from requant.validate.decode_model import Attention, Decoder, Gate, Layer, Matrix, Mlp, Moe, Router
from requant.validate.decode_products import Products
from requant.validate.decode_reference import BOUND, check_prefill, check_step, few_layers

HIDDEN, INNER, EXPERTS, VOCABULARY = 64, 96, 6, 50


def matrix(rng, *shape):
    return Matrix(NumberFormat.BF16, 0, torch.randn(shape, generator=rng) / shape[-1] ** 0.5)


@pytest.fixture
def model():
    """gpt-oss in small: six layers, windows in turn, experts with biases, sinks; one dense layer."""
    rng = torch.Generator().manual_seed(1)
    made = []
    for index in range(6):
        attention = Attention(
            4, 2, 32, 32**-0.5, matrix(rng, 256, HIDDEN), matrix(rng, HIDDEN, 128), window=0 if index % 2 else 5,
            qkv_bias=torch.randn(256, generator=rng), out_bias=torch.randn(HIDDEN, generator=rng),
            sinks=torch.randn(4, generator=rng),
        )  # fmt: skip
        router = Router(torch.randn((EXPERTS, HIDDEN), generator=rng), 2, torch.randn(EXPERTS, generator=rng))
        moe = Moe(
            router, matrix(rng, EXPERTS, 2 * INNER, HIDDEN), matrix(rng, EXPERTS, HIDDEN, INNER), Gate(True, 7.0, 1.7),
            torch.randn((EXPERTS, 2 * INNER), generator=rng), torch.randn((EXPERTS, HIDDEN), generator=rng),
        )  # fmt: skip
        mlp = Mlp(matrix(rng, 2 * INNER, HIDDEN), matrix(rng, HIDDEN, INNER), Gate()) if index == 4 else moe
        made.append(Layer(torch.ones(HIDDEN), attention, torch.ones(HIDDEN), mlp))
    angles = torch.arange(64)[:, None] * torch.logspace(0, -2, 16)[None]
    embedding = torch.randn((VOCABULARY, HIDDEN), generator=rng)
    head = matrix(rng, VOCABULARY, HIDDEN)
    return Decoder("Toy", embedding, tuple(made), torch.ones(HIDDEN), 1e-6, head, angles.cos(), angles.sin())


def test_one_layer_of_each_kind_is_enough(model):
    kinds = [(a.attention.window, isinstance(a.mlp, Moe)) for a in few_layers(model).layers]
    assert kinds == [(5, True), (0, True), (5, False)]
    plain = model.layers[1]
    fp4 = replace(
        plain, attention=replace(plain.attention, out=replace(plain.attention.out, stored=NumberFormat.NVFP4))
    )
    mixed = few_layers(replace(model, layers=(plain, plain, fp4, fp4)))
    assert [layer.attention.out.stored for layer in mixed.layers] == [NumberFormat.BF16, NumberFormat.NVFP4]
    alike = replace(model, layers=model.layers[1:2] * 4)
    assert len(few_layers(alike).layers) == 2
    assert len(few_layers(replace(model, layers=model.layers[:1])).layers) == 1


@pytest.mark.parametrize("streams", [1, 3])
def test_a_right_step_and_a_right_prefill_are_the_reference_but_for_fp32(model, streams):
    found = check_step(model, streams, 40, Products(model))
    assert 0 < found.error < 1e-5
    assert found.routing == 0
    assert (found.layers, found.wrong) == (3, False)
    found = check_prefill(model, torch.arange(30), Products(model))
    assert 0 < found.error < 1e-5
    assert not found.wrong


def test_packed_weights_are_read_as_the_numbers_of_their_codes(model):
    rng = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (EXPERTS, 2 * INNER, HIDDEN // 2), dtype=torch.uint8, generator=rng)
    scales = torch.randint(40, 60, (EXPERTS, 2 * INNER, HIDDEN // 16), dtype=torch.uint8, generator=rng)
    packed = Fp4Tensor(NumberFormat.NVFP4, codes, scales, torch.rand(EXPERTS, generator=rng) + 0.5)
    one = Matrix(NumberFormat.NVFP4, 0, packed=packed)
    plain = as_bf16(one).plain.double()
    ids = torch.tensor([[0, 5], [3, 0]])
    x = torch.randn((2, HIDDEN), generator=rng, dtype=torch.float64)
    y = decode_reference._Exact(model).grouped(x, one, ids, None)
    expected = torch.einsum("tk,tjnk->tjn", x, plain[ids])
    assert ((y - expected).norm() / expected.norm()) < 2**-8  # BF16 rounds the scaled numbers
    dense = Matrix(
        NumberFormat.NVFP4, 0, packed=Fp4Tensor(NumberFormat.NVFP4, codes[5], scales[5], packed.global_scale[5:])
    )
    assert decode_reference._Exact(model).dense(x, dense)[0] == pytest.approx(y[0, 1], rel=1e-12)


class CutProducts(Products):
    """Leaves out the last block of 16 of every product of experts."""

    def grouped(self, x, weight, ids, routing):
        cut = weight.plain.clone()
        cut[..., -16:] = 0
        return super().grouped(x, replace(weight, plain=cut), ids, routing)


class Glue(PlainGlue):
    """One thing wrong."""

    def __init__(self, wrong):
        self.wrong = wrong

    def attend(self, qkv, attention, cache, positions, tables, eps):
        if self.wrong == "window":
            attention = replace(attention, window=0)
        if self.wrong == "sinks":
            attention = replace(attention, sinks=None)
        if self.wrong == "bias":
            attention = replace(attention, qkv_bias=None)
        if self.wrong == "position":
            tables = tuple(table.roll(1, 0) for table in tables)
        return super().attend(qkv, attention, cache, positions, tables, eps)

    def gate(self, both, gate, ids, bias):
        return super().gate(both, replace(gate, interleaved=False) if self.wrong == "gate" else gate, ids, bias)

    def choose(self, h, added, norm, eps, router, ids, *, route):
        if self.wrong == "router":
            router = replace(router, weight=-router.weight)
        chosen = super().choose(h, added, norm, eps, router, ids, route=route)
        if self.wrong == "twice":
            chosen.ids[:, 1] = chosen.ids[:, 0]
        if self.wrong == "weights":
            chosen = replace(chosen, weights=chosen.weights.flip(-1))
        return chosen


@pytest.mark.parametrize("wrong", ["window", "sinks", "bias", "position", "gate", "router", "twice", "weights"])
def test_a_step_that_is_wrong_the_same_way_each_time_is_seen(monkeypatch, model, wrong):
    monkeypatch.setattr("requant.validate.decode_engine.make_glue", lambda _: Glue(wrong))
    found = check_step(model, 3, 40, Products(model))
    assert found.wrong
    if wrong in ("router", "twice"):
        assert found.routing > 5 * BOUND
    else:
        assert found.error > 2 * BOUND


def test_a_product_that_leaves_out_a_block_is_seen_and_nan_never_passes(monkeypatch, model):
    found = check_step(model, 2, 40, CutProducts(model))
    assert found.error > 2 * BOUND
    monkeypatch.setattr(
        Products, "dense", lambda self, x, weight, **_: x.new_full((len(x), weight.shape[0]), torch.nan)
    )
    assert check_step(model, 1, 40, Products(model)).wrong


def test_the_products_that_are_timed_are_those_that_were_held_to_the_reference(monkeypatch, model):
    from pathlib import Path

    order = []
    monkeypatch.setattr(Engine, "tune", lambda self: order.append("tune"))
    monkeypatch.setattr(Engine, "capture", lambda self, prompt_tokens=0: order.append(f"capture {prompt_tokens}"))
    real = decode_speed.check_step
    monkeypatch.setattr(decode_speed, "check_step", lambda *a: (order.append("check"), real(*a))[1])
    monkeypatch.setattr(decode_speed, "load_decoder", lambda path, **_: model)
    gate = SpeedGate(device="cpu", concurrency=(2,), requests=(2,), prompt_tokens=20, output_tokens=4)
    decode_speed.measure_model(Path("o"), None, gate, read_gbps=None, device="cpu")
    assert order[order.index("tune") :] == ["tune", "check", "capture 0", "capture 20"]


def test_a_prefill_that_is_wrong_is_seen(monkeypatch, model):
    real = decode_reference.prefill

    def uncaused(decoder, *rest):
        layers = [replace(a, attention=replace(a.attention, window=0)) for a in decoder.layers]
        return real(replace(decoder, layers=tuple(layers)), *rest)

    monkeypatch.setattr("requant.validate.decode_engine.prefill", uncaused)
    assert check_prefill(model, torch.arange(30), Products(model)).error > 2 * BOUND


@pytest.mark.parametrize("wrong", ["attention", "experts", "tile"])
def test_a_prefill_that_is_wrong_in_the_last_kind_of_layer_or_in_one_tile_is_seen(monkeypatch, model, wrong):
    model, real = replace(model, layers=model.layers[:4]), decode_reference.prefill

    def spoilt(decoder, cache, *rest):
        layers = list(decoder.layers)
        if wrong == "attention":
            layers[1] = replace(layers[1], attention=replace(layers[1].attention, sinks=None))
        if wrong == "experts":
            layers[1] = replace(layers[1], mlp=replace(layers[1].mlp, down_bias=None))
        out = real(replace(decoder, layers=tuple(layers)), cache, *rest)
        for part in cache.layers[-1] if wrong == "tile" else ():
            part[:, :, 48:] += 1
        return out

    assert check_prefill(model, torch.arange(57) % VOCABULARY, Products(model)).error < 1e-5
    monkeypatch.setattr("requant.validate.decode_engine.prefill", spoilt)
    assert check_prefill(model, torch.arange(57) % VOCABULARY, Products(model)).error > 2 * BOUND


def test_a_token_that_is_not_the_largest_logit_is_seen(monkeypatch, model):
    class Off(Engine):
        def step(self, *, eager=False):
            super().step(eager=eager)
            self.state.tokens.add_(1)

    monkeypatch.setattr(decode_reference, "Engine", Off)
    assert check_step(model, 1, 40, Products(model)).error == float("inf")


def test_a_speed_of_wrong_numbers_fails_the_gate_and_is_kept(monkeypatch, model):
    from pathlib import Path

    from requant.validate import speed

    gate = SpeedGate(device="cpu", concurrency=(2,), requests=(2,), prompt_tokens=20, output_tokens=4)
    monkeypatch.setattr(decode_speed, "load_decoder", lambda path, **_: model)
    found = decode_speed.measure_model(Path("o"), None, gate, read_gbps=None, device="cpu")
    point = found.runs["converted"][0]
    assert 0 < point["of_reference"]["error"] < 1e-5
    assert 0 < found.data["runs"][0]["prefill_of_reference"]["error"] < 1e-5
    assert not found.findings
    assert set(found.data["seconds"]) == {
        "load", "choosing products", "reference", "capture", "graph against eager", "waves"
    }  # fmt: skip
    monkeypatch.setattr("requant.validate.decode_engine.make_glue", lambda _: Glue("sinks"))
    monkeypatch.setattr(
        speed, "bench_kernels", lambda *_, **__: SimpleNamespace(
            wrong=(), points=(), ceilings=None, on_gpu=False, device="cpu (x)", to_json=dict
        )
    )  # fmt: skip
    result = speed.check_speed(Path("o"), gate)
    assert result.status == "failed"
    assert result.reason.startswith("the logits of 2 streams' step are off by 0.")
    assert result.reason.endswith("against 0.02 that rounding explains (3 layers, float64 products)")
    assert [f.rule for f in result.findings] == ["reference-differs"]
    assert result.data["runs"][0]["points"][0]["decode_tokens_per_s"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 3, 9])
def test_the_fused_step_and_prefill_on_a_gpu_are_the_reference_but_for_bf16(model, streams):
    """Captured: prefill and step as graphs. The experts in NVFP4, K = 64 and 96, the rest in BF16."""
    from dataclasses import fields, is_dataclass

    def moved(value, name=""):
        if isinstance(value, torch.Tensor):
            return value.cuda() if name in ("cos", "sin") else value.cuda().bfloat16()
        if isinstance(value, tuple):
            return tuple(moved(v) for v in value)
        if is_dataclass(value):
            return replace(value, **{f.name: moved(getattr(value, f.name), f.name) for f in fields(value)})
        return value

    def fp4(experts, rows, k):
        rng = torch.Generator().manual_seed(k)
        codes = torch.randint(0, 256, (experts, rows, k // 2), dtype=torch.uint8, generator=rng).cuda()
        scales = torch.randint(32, 48, (experts, rows, k // 16), dtype=torch.uint8, generator=rng).cuda()
        packed = Fp4Tensor(NumberFormat.NVFP4, codes, scales, torch.full((experts,), 0.25).cuda())
        return Matrix(NumberFormat.NVFP4, 0, packed=packed)

    there = moved(model)
    layers = [
        replace(
            a, mlp=replace(a.mlp, gate_up=fp4(EXPERTS, 2 * INNER, HIDDEN), down=fp4(EXPERTS, HIDDEN, INNER))
        ) if isinstance(a.mlp, Moe) else a
        for a in there.layers
    ]  # fmt: skip
    for decoder in (there, replace(there, layers=tuple(layers))):
        found = check_step(decoder, streams, 40, Products(decoder))
        assert 0 < found.error < BOUND
        assert found.routing < BOUND
        assert check_prefill(decoder, torch.arange(30).cuda(), Products(decoder)).error < BOUND
