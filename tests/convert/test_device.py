"""`execute.device`: a GPU writes the processor's bytes, takes what its kernels know, and is never pretended.

The passes over tiles run here on a lane of numpy that keeps the device's order of bytes and the CPU's numbers, so that
offsets, passes, memory and faults are tested without a GPU; `-m gpu` runs the same on one.
"""

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from requant.convert import device, files
from requant.convert.device import GpuCompute, choose_device, gpu_refusal, shares_of
from requant.convert.meter import Interval, Meter
from requant.convert.pipeline import prepare, run_job
from requant.convert.runrecord import run_text
from requant.convert.show import plan_json
from requant.kernels import repack_jit
from requant.kernels.cpu_dequant import dequantize_fp8_block
from requant.kernels.gpu_lane import align, input_bytes, output_bytes
from requant.kernels.quantize import NonFiniteError, amax, bf16_to_nvfp4
from requant.manifests.errors import EnvironmentFault, SourceError, UsageError

PLAIN = [{"match": "model.*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]


class FakeSlot:
    def __init__(self, tile):
        self.input, self.output = np.zeros(input_bytes(tile), np.uint8), np.zeros(output_bytes(tile), np.uint8)
        self.device, self.result, self.busy = np.zeros_like(self.input), np.zeros_like(self.output), False


class FakeLane:
    """GpuLane's calls in numpy. `wait` alone makes results visible, and a slot in flight cannot be taken again."""

    def __init__(self, tile=6000, held=1 << 30):
        self.tile, self._held_bytes, self._slots, self._turn = tile, held, [FakeSlot(tile), FakeSlot(tile)], 0
        self._sums = {name: np.zeros(size, np.int64) for name, size in
                      {"amax": 1, "census": 8192, "lossy": 258, "halves": 4}.items()}  # fmt: skip
        self.uploads, self.settled, self._user = 0, 0, None

    def enter(self):
        self._user = threading.get_ident()

    def slot(self):
        assert self._user == threading.get_ident(), "a lane belongs to the thread that entered it last"
        self._turn ^= 1
        assert not self._slots[self._turn].busy
        return self._slots[self._turn]

    def hold(self, nbytes):
        return np.zeros(nbytes, np.uint8) if nbytes <= self._held_bytes else None

    def constant(self, values):
        return values.copy()

    def queue(self, slot, job, sent, fetched, at=None):
        slot.busy, slot.fetched, self.uploads = True, fetched, self.uploads + (sent > 0)
        buffer = slot.device if at is None else at
        buffer[:sent] = slot.input[:sent]
        slot.input[:] = 0xEE  # what is read into it too early is lost
        getattr(self, job.op)(slot, buffer, job)

    def wait(self, slot):
        slot.output[: slot.fetched], slot.busy = slot.result[: slot.fetched], False
        return [("to_gpu", 1.0, 2.0), ("kernels", 2.0, 2.5), ("from_gpu", 2.5, 3.0)]

    def settle(self):
        self.settled += 1
        for slot in self._slots:
            slot.busy = False

    def begin(self, name):
        self._sums[name][:] = 0

    def end(self, name):
        return self._sums[name].copy()

    def _values(self, at, job):
        source, size = job.source, {None: 2, 0: 2, 1: 4, 2: 1}[job.source.kind]
        dtype = {None: "<u2", 0: "<f2", 1: "<f4", 2: "u1"}[source.kind]
        raw = np.ascontiguousarray(at[: job.blocks * 16 * size]).view(dtype).reshape(-1, 16 * source.blocks_per_row)
        if source.kind != 2:
            return raw
        out = np.empty(raw.shape, np.float32)
        dequantize_fp8_block(raw, source.grid, (source.high, source.wide), out, job.row)
        return out

    def amax(self, slot, at, job):
        try:
            largest = np.float32(amax(self._values(at, job)))
        except NonFiniteError:
            largest = np.float32(np.inf)
        self._sums["amax"][0] = max(int(largest.view(np.uint32)), int(self._sums["amax"][0]))

    def set_scale(self, scale):
        self._scale = scale

    def encode(self, slot, at, job):
        w = self._values(at, job)
        codes, scales = np.empty((len(w), w.shape[1] // 2), np.uint8), np.empty((len(w), w.shape[1] // 16), np.uint8)
        bf16_to_nvfp4(w, self._scale, codes, scales)
        self._put(slot, job, codes, scales)

    def _put(self, slot, job, codes, scales):
        assert codes.size == job.codes_out
        slot.result[: codes.size], begin = codes.reshape(-1), align(codes.size)
        slot.result[begin : begin + scales.size] = scales.reshape(-1)

    @staticmethod
    def _planes(at, job):
        codes, scales = at[: 16 * job.blocks], at[job.scales_at : job.scales_at + job.blocks]
        return codes.reshape(1, -1), scales.reshape(1, -1)

    def census(self, slot, at, job):
        repack_jit.half_census(*self._planes(at, job), self._sums["census"].reshape(256, 4, 4, 2))

    def lossy(self, slot, at, job):
        total = self._sums["lossy"]
        total[256] += repack_jit.lossy_error(*self._planes(at, job), job.m, total[:256])

    def halves(self, slot, at, job):
        planes, counts = self._planes(at, job), np.zeros(4, np.int64)
        out = np.empty_like(planes[0]), np.empty((1, 2 * job.blocks), np.uint8)
        repack_jit.repack_tile(*planes, job.m, *out, counts)
        self._put(slot, job, *out)
        self._sums["halves"][:3] += counts[1:]


def use(monkeypatch, make_lane):
    """`execute.device: cuda` runs on these lanes; the list of those made."""
    made = []

    def make():
        made.append(make_lane())
        return made[-1]

    monkeypatch.setattr(device, "_gpu", lambda workers, reason: GpuCompute(make, "a fake GPU", reason, workers))
    return made


# --- checkpoints ------------------------------------------------------------------------------------------------------


def plain_weight(rng, dtype, n, k):
    w = (rng.standard_normal((n, k)) * np.exp2(rng.uniform(-6, 2, (n, 1)))).astype("<f4")
    if dtype == "BF16":
        return dtype, (n, k), (w.view(np.uint32) >> 16).astype("<u2").tobytes()
    return dtype, (n, k), w.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()


def plain(kit, rows=40, k=160):
    """Two shards; q, k and v share a scale across them, BF16; gate and up are F16, down is F32."""

    def weight(leaf, dtype, n):
        return f"model.layers.0.{leaf}_proj.weight", plain_weight(kit.rng, dtype, n, k)

    first = [weight("self_attn.q", "BF16", rows), weight("self_attn.k", "BF16", rows // 2)]
    second = [weight("self_attn.v", "BF16", rows // 2), weight("self_attn.o", "BF16", rows + 7)]
    second += [weight("mlp.gate", "F16", 2 * rows), weight("mlp.up", "F16", 2 * rows), weight("mlp.down", "F32", rows)]
    shards = [dict(first), {**dict(second), "model.layers.0.input_layernorm.weight": kit.bf16(kit.rng, k)}]
    return kit.write_checkpoint(kit.tmp / "plain", shards, {"model_type": "llama"}), PLAIN


def fp8(kit, n=300, k=336):
    """DeepSeek-V3: 128 x 128 blocks, ragged at both edges, scales F32."""
    tensors = {"model.norm.weight": kit.bf16(kit.rng, k)}
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.mlp.{leaf}"
        values = kit.rng.integers(0, 256, (n, k), dtype=np.uint8)
        values[(values & 0x7F) == 0x7F] = 0x3C
        grid = np.exp2(kit.rng.uniform(-12, -4, (-(-n // 128), -(-k // 128)))).astype("<f4")
        tensors[f"{name}.weight"] = ("F8_E4M3", (n, k), values.tobytes())
        tensors[f"{name}.weight_scale_inv"] = ("F32", grid.shape, grid.tobytes())
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = kit.write_checkpoint(kit.tmp / "fp8", [tensors], {"model_type": "llama", "quantization_config": quant})
    return folder, PLAIN


def deepseek(kit, low=84, high=120, hidden=192, inter=96):
    """MXFP4 experts whose exponents span more than any window: codes must be looked at."""
    tensors = kit.deepseek(kit.rng, hidden=hidden, inter=inter, low=low, high=high)
    grid = -(-hidden // 128)
    for name in [name for name in tensors if name.endswith("wo_b.scale")]:
        tensors[name] = ("F8_E8M0", (grid, grid), bytes([127]) * grid * grid)
    return kit.write_checkpoint(kit.tmp / f"ds{low}", [tensors], kit.DSV4_CONFIG), kit.EXPERTS


MAKERS = [plain, fp8, deepseek]


def job_of(kit, made, where, name, **more):
    folder, layers = made
    path = kit.tmp / f"{name}.yaml"
    path.write_text(kit.manifest_text(folder, kit.tmp / name, layers))
    sets = [f"execute.device={where}", *(f"{key}={value}" for key, value in more.items())]
    return prepare(str(path), sets)


def run_on(kit, made, where, name, **more):
    result = run_job(job_of(kit, made, where, name, **more))
    return (
        result,
        {file.name: file.read_bytes() for file in result.output.glob("*.safetensors")},
        result.record["device"],
    )


# --- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [1 << 30, 0], ids=["held between the passes", "read twice"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_gpu_writes_the_bytes_and_counts_of_the_processor(kit, monkeypatch, make, held):
    checkpoint = make(kit)
    on_cpu, expected, _ = run_on(kit, checkpoint, "cpu", "cpu")
    lanes = use(monkeypatch, lambda: FakeLane(held=held))
    on_gpu, found, record = run_on(kit, checkpoint, "cuda", "gpu", **{"execute.workers": 2})
    assert expected and found == expected
    assert [on_gpu.counts[u] for u in sorted(on_gpu.counts)] == [on_cpu.counts[u] for u in sorted(on_cpu.counts)]
    assert record["groups_on_gpu"] == len(job_of(kit, checkpoint, "cpu", "n").plan.groups)
    assert sum(lane.uploads for lane in lanes) > 4 * (1 if held else 2), "several tiles, or nothing was tested"
    lock, other = (json.loads((kit.tmp / name / "requant.lock.json").read_text()) for name in ("cpu", "gpu"))
    assert (lock["plan_sha256"], lock["groups"]) == (other["plan_sha256"], other["groups"])


def test_mxfp4_within_its_window_is_copied_by_the_system(kit, monkeypatch):
    checkpoint = deepseek(kit, low=100, high=114)
    _, expected, _ = run_on(kit, checkpoint, "cpu", "cpu")
    lanes = use(monkeypatch, FakeLane)
    _, found, record = run_on(kit, checkpoint, "cuda", "gpu")
    assert found == expected
    assert sum(lane.uploads for lane in lanes) == 0
    assert record["bytes"]["copy"] > 0 and "to_gpu" not in record["bytes"]


def test_a_killed_run_on_the_gpu_is_finished_by_the_processor(kit, monkeypatch):
    checkpoint = plain(kit)
    _, expected, _ = run_on(kit, checkpoint, "cpu", "cpu")
    use(monkeypatch, FakeLane)
    calls = 0
    real = device.run_unit

    def dies(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(*arguments)

    monkeypatch.setattr(device, "run_unit", dies)
    with pytest.raises(EnvironmentFault, match="the GPU failed: CUDA error: an illegal memory access") as fault:
        run_on(kit, checkpoint, "cuda", "gpu", **{"execute.workers": 1})
    assert fault.value.exit_code == 6
    assert not (kit.tmp / "gpu").exists()
    result, found, record = run_on(kit, checkpoint, "cpu", "gpu")
    assert (result.resumed >= 1, record["name"], found) == (True, "cpu", expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_gets_the_processors_message(kit, monkeypatch, bad):
    folder, layers = plain(kit)
    path = folder / "model-00002-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = 8 + int.from_bytes(raw[:8], "little")
    at = begin + header["model.layers.0.mlp.down_proj.weight"]["data_offsets"][0] + 4 * (21 * 160 + 7)
    raw[at : at + 4] = np.float32(bad).tobytes()
    path.write_bytes(bytes(raw))
    use(monkeypatch, FakeLane)
    with pytest.raises(SourceError, match=r"down_proj\.weight: value at row 21, column 7 is NaN, infinite"):
        run_on(kit, (folder, layers), "cuda", "gpu")


def test_a_source_cut_short_is_named_and_the_lane_is_settled(kit, monkeypatch):
    checkpoint = plain(kit)
    lanes = use(monkeypatch, FakeLane)
    job = job_of(kit, checkpoint, "cuda", "gpu", **{"execute.workers": 1})
    path = checkpoint[0] / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(SourceError, match=r"model-00001-of-00002\.safetensors: ends at byte"):
        run_job(job, force=True)
    assert [lane.settled for lane in lanes] == [1]


def test_reading_into_memory_where_the_system_lacks_preadv(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(200)))
    view = np.zeros(50, np.uint8)
    with path.open("rb") as file:
        for _ in range(2):
            view[:] = 0
            files.read_into(file.fileno(), view, 100, "x")
            assert view.tolist() == list(range(100, 150))
            with pytest.raises(SourceError, match="x: ends at byte 200"):
                files.read_into(file.fileno(), view, 160, "x")
            monkeypatch.delattr(files.os, "preadv", raising=False)


# --- what the GPU takes -----------------------------------------------------------------------------------------------


def test_a_plan_says_what_the_gpu_takes_and_what_not(kit):
    shares = shares_of(job_of(kit, plain(kit), "cuda", "a").plan)
    assert (shares.groups, shares.repacked, shares.refused) == (4, 0, {})
    assert shares.nbytes == 160 * (80 * 2 + 47 * 2 + 160 * 2 + 40 * 4)
    memory = [plan_json(job_of(kit, plain(kit), where, "a").plan)["needs"]["memory_bytes"] for where in ("cpu", "cuda")]
    assert memory[1] - memory[0] > 2 * 2**30, "torch, the context and pinned memory"
    folder, _ = plain(kit)
    choices = [{"match": "*.o_proj", "to": "nvfp4", "scale": "mse"}, *PLAIN]
    shares = shares_of(job_of(kit, (folder, choices), "cuda", "b").plan)
    assert (shares.groups, shares.refused) == (3, {"scale mse": 1})
    assert shares.text == "on a GPU: 3 of 4 groups\non the processor: 1 groups, scale mse"
    rules = "[{match: 'model.*_proj', to: mxfp4, scale: nearest}, {match: '*', to: keep}]"
    sets = ["target.format=mxfp4", "activations.input_scale=null", f"layers={rules}"]
    to_mxfp4 = prepare(str(kit.tmp / "b.yaml"), sets).plan
    assert {gpu_refusal(unit) for unit in to_mxfp4.groups} == {"no GPU kernel writes MXFP4"}


def test_stacked_experts_written_transposed_and_interleaved_rows_stay_on_the_processor(kit):
    layers = [{"match": "*.mlp.experts*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    folder = kit.write_checkpoint(kit.tmp / "oss", [kit.gpt_oss(kit.rng, low=80, high=120)], kit.GPT_OSS_CONFIG)
    job = job_of(kit, (folder, layers), "cuda", "a")
    assert set(map(gpu_refusal, job.plan.groups)) == {"planes are written transposed"}
    experts = prepare(str(kit.tmp / "a.yaml"), ["target.layout=modelopt-experts", "target.runtimes=[]"])
    assert set(map(gpu_refusal, experts.plan.groups)) == {"rows are not side by side in the source", ""}


def test_every_unit_that_is_refused_runs_on_the_processor_and_is_counted(kit, monkeypatch):
    folder, _ = plain(kit)
    choices = [{"match": "*.o_proj", "to": "nvfp4", "scale": "mse"}, *PLAIN]
    _, expected, _ = run_on(kit, (folder, choices), "cpu", "cpu")
    use(monkeypatch, FakeLane)
    _, found, record = run_on(kit, (folder, choices), "cuda", "gpu")
    assert found == expected
    assert (record["groups_on_gpu"], record["groups_on_processor"]) == (3, {"scale mse": 1})
    assert record["bytes"]["processor"] == 47 * 160 * 2


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_cuda_without_a_gpu_is_exit_6_before_anything_is_written(kit):
    import torch

    if torch.cuda.is_available():
        pytest.fail("this test is for machines without a GPU: deselect it with -m gpu")
    with pytest.raises(EnvironmentFault, match=r"execute\.device: no GPU can convert here: there is no GPU\n") as fault:
        run_job(job_of(kit, plain(kit), "cuda", "out"))
    assert fault.value.exit_code == 6 and "execute.device: cpu" in fault.value.hint
    assert not list(kit.tmp.glob("out*[!l]")), "neither an output nor a partial one"


def test_cuda_on_a_cluster_is_refused(kit):
    with pytest.raises(UsageError, match=r"execute\.device: cuda with engine: ray: is not part of this version"):
        job_of(kit, plain(kit), "cuda", "out", **{"execute.engine": "ray"})


def test_auto_stays_on_the_processor_and_says_why(kit, monkeypatch):
    plan = job_of(kit, plain(kit), "auto", "out").plan
    assert choose_device(plan, 2) == (None, "auto: 0.0 GB to quantize, too little for a GPU")
    monkeypatch.setattr(device, "WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(device, "_driver_finds_gpu", lambda: False)
    assert choose_device(plan, 2) == (None, "auto: no NVIDIA GPU")
    monkeypatch.setattr(device, "_driver_finds_gpu", lambda: True)
    monkeypatch.setattr(device, "_processor_rate", lambda: 1.5)
    why = "auto: 0.0 GB to quantize, measured 3.0 GB/s here; a GPU starts no faster"
    assert choose_device(plan, 2) == (None, why)
    monkeypatch.setattr(device, "START_S", 0)
    assert choose_device(plan, 2)[1].startswith("auto: no GPU can convert here: ")


@pytest.mark.parametrize(("gpu_rate", "taken"), [(30.0, True), (2.1, False)])
def test_auto_takes_the_gpu_only_where_it_measured_faster(kit, monkeypatch, gpu_rate, taken):
    use(monkeypatch, FakeLane)
    monkeypatch.setattr(device, "WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(device, "START_S", 0)
    monkeypatch.setattr(device, "_driver_finds_gpu", lambda: True)
    monkeypatch.setattr(device, "_processor_rate", lambda: 1.0)
    monkeypatch.setattr(device, "_gpu_rate", lambda compute: gpu_rate)
    compute, why = choose_device(job_of(kit, plain(kit), "auto", "out").plan, 2)
    assert (compute is not None) is taken
    assert why == f"auto: measured {gpu_rate} GB/s of BF16 through a fake GPU, 2.0 on 2 workers"


def test_auto_stays_on_the_processor_where_the_gpu_has_no_room(kit, monkeypatch):
    use(monkeypatch, FakeLane)
    monkeypatch.setattr(device, "WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(device, "START_S", 0)
    monkeypatch.setattr(device, "_driver_finds_gpu", lambda: True)
    monkeypatch.setattr(device, "_processor_rate", lambda: 1.0)

    def full(_):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(device, "_gpu_rate", full)
    plan = job_of(kit, plain(kit), "auto", "out").plan
    assert choose_device(plan, 2) == (None, "auto: the GPU failed: CUDA out of memory")


def test_the_rates_are_measured_through_the_lane():
    lanes = []

    def make():
        lanes.append(FakeLane(tile=1 << 23))
        return lanes[0]

    assert device._gpu_rate(GpuCompute(make, "fake", "", 1)) > 0
    assert (len(lanes), lanes[0].uploads) == (1, 48)
    assert device._processor_rate() > 0


def test_a_conversion_without_a_gpu_imports_no_torch(kit):
    folder, layers = plain(kit)
    path = kit.tmp / "m.yaml"
    path.write_text(kit.manifest_text(folder, kit.tmp / "out", layers))
    program = (
        "import sys; from requant.convert.pipeline import prepare, run_job\n"
        "result = run_job(prepare(sys.argv[1])); print(result.record['device']['name'], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cpu", "False"]


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_meter_takes_inner_stages_out_of_outer_ones_and_unites_overlaps():
    meter = Meter()
    with meter.time("copy", 100):
        time.sleep(0.05)
        with meter.time("read", 7):
            time.sleep(0.15)
    meter.ran([Interval("to_gpu", 1.0, 3.0), Interval("kernels", 3.0, 3.5)], 10, 0)
    meter.ran([Interval("to_gpu", 2.0, 4.0), Interval("kernels", 4.0, 4.5)], 10, 4)
    record = meter.record()
    assert record["gpu_seconds"] == {"to_gpu": 3.0, "kernels": 1.0, "from_gpu": 0.0}
    assert record["bytes"] == {"copy": 100, "read": 7, "to_gpu": 20, "from_gpu": 4}
    assert 0.05 <= record["worker_seconds"]["copy"] < 0.12 and record["worker_seconds"]["read"] >= 0.15
    assert record["bound"] == "disk"


@pytest.mark.parametrize(
    ("waits", "intervals", "bound"),
    [
        ({"read": 0.01, "gpu": 0.05}, [Interval("to_gpu", 0.0, 2.0), Interval("kernels", 0.0, 1.0)], "PCIe"),
        ({"read": 0.01, "gpu": 0.05}, [Interval("to_gpu", 0.0, 1.0), Interval("kernels", 0.0, 2.0)], "GPU kernels"),
        ({"read": 0.01, "processor": 0.05}, [], "processor"),
    ],
)
def test_the_bound_is_what_the_workers_wait_for(waits, intervals, bound):
    meter = Meter()
    for stage, seconds in waits.items():
        with meter.time(stage):
            time.sleep(seconds)
    meter.ran(intervals, 1, 1)
    assert meter.record()["bound"] == bound


def test_intervals_with_gaps_between_them_are_not_merged_at_every_one(monkeypatch):
    from requant.convert import meter

    merges, real = [], meter._Busy._merge
    monkeypatch.setattr(meter._Busy, "_merge", lambda self: (merges.append(1), real(self)))
    busy = meter._Busy()
    for number in range(20_000):
        busy.add(2.0 * number, 2.0 * number + 1.0)
    assert len(merges) == 3
    assert busy.seconds == 20_000.0


def test_the_report_says_what_bounds_the_run():
    device_record = {
        "name": "cuda", "chip": "NVIDIA H200", "reason": "execute.device: cuda", "groups_on_gpu": 1200,
        "groups_on_processor": {"scale mse": 3}, "worker_seconds": {"copy": 1.0, "gpu": 1.0, "read": 2.0, "write": 6.0},
        "gpu_seconds": {"to_gpu": 1.0, "kernels": 0.2, "from_gpu": 0.25},
        "bytes": {"to_gpu": 50 * 10**9, "from_gpu": 10**10}, "bound": "disk",
    }  # fmt: skip
    record = {"engine": "local", "seconds": 10.0, "gb_per_s": 5.0, "workers": 4, "worker_gb_per_s": 1.25, "nodes": [],
              "stragglers": [], "device": device_record}  # fmt: skip
    assert run_text(record).splitlines()[1:] == [
        "  computed on NVIDIA H200 (execute.device: cuda): 1,200 groups; bound by disk",
        "    the workers' time: copying files 10%, waiting for the GPU 10%, reading 20%, writing 60%",
        "    to the GPU: 50.00 GB, 50.0 GB/s while at it, 10% of the run",
        "    from the GPU: 10.00 GB, 40.0 GB/s while at it, 2% of the run",
        "    kernels: 2% of the run",
        "    on the processor: 3 groups, scale mse",
    ]


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("make", [
    lambda kit: plain(kit, rows=9000, k=1024),
    lambda kit: fp8(kit, n=9000, k=1936),
    lambda kit: deepseek(kit, hidden=4096, inter=2048),
], ids=["plain", "FP8 blocks", "DeepSeek-V4"])  # fmt: skip
@pytest.mark.parametrize("held", [1 << 30, 0], ids=["held between the passes", "read twice"])
def test_the_gpu_writes_the_bytes_of_the_processor(kit, monkeypatch, make, held):
    """Several tiles of 8 MiB a member, ragged FP8 blocks, exponents out of every window."""
    monkeypatch.setattr(device, "HELD_BYTES", held)
    checkpoint = make(kit)
    on_cpu, expected, _ = run_on(kit, checkpoint, "cpu", "cpu")
    on_gpu, found, record = run_on(kit, checkpoint, "cuda", "gpu")
    assert found == expected
    assert on_gpu.counts == on_cpu.counts
    assert record["groups_on_gpu"] > 0 and record["bytes"]["to_gpu"] > 8 << 20
