"""W4A16 on a machine with several GPUs: launches go to the operands' device and stream; the current one stays."""

import sys
from types import SimpleNamespace

import pytest
from requant.kernels import w4a16, w4a16_library, w4a16_operands
from requant.kernels.formats import NumberFormat


class Gpus:
    """Stands in for torch.cuda: which device is current, and on which ones something was launched."""

    def __init__(self, monkeypatch):
        import torch

        self.current, self.launched = 0, []
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", self.stream)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "set_device", self.set)
        monkeypatch.setattr(w4a16_operands, "processors_of", lambda _: 132)
        monkeypatch.setattr(w4a16, "uses_triton", lambda _="auto": False)
        monkeypatch.setattr(w4a16_library, "load", lambda _: None)
        monkeypatch.setattr(w4a16_library, "launch", lambda _, __, stream: self.launch(stream))
        monkeypatch.setattr(w4a16_library, "route", lambda *given: self.launch(given[-1]))

    def on(self, device):
        gpus, before = self, self.current

        class Guard:
            def __enter__(self):
                gpus.current = device.index

            def __exit__(self, *_):
                gpus.current = before

        return Guard()

    def set(self, device):
        self.current = device.index

    def stream(self, device=None):
        return SimpleNamespace(cuda_stream=f"stream of {self.current if device is None else device.index}")

    def launch(self, stream):
        self.launched.append((self.current, stream))


@pytest.fixture
def gpus(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    monkeypatch.setattr(FakeTensor, "data_ptr", lambda _: 256)
    monkeypatch.setattr(FakeTensor, "__getitem__", lambda whole, _: whole)  # torch's own wants the device there
    with FakeTensorMode():
        yield Gpus(monkeypatch)


def test_a_launch_on_another_gpu_leaves_the_current_one(gpus):
    import torch

    there = {"device": "cuda:1"}
    x = torch.empty(3, 256, dtype=torch.bfloat16, **there)
    codes, scales = (torch.empty(32, width, dtype=torch.uint8, **there) for width in (128, 16))
    y = w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
    assert (y.device.index, gpus.launched, gpus.current) == (1, [(1, "stream of 1")], 0)
    codes, scales = (torch.empty(5, 32, width, dtype=torch.uint8, **there) for width in (128, 16))
    ids = torch.zeros(3, 2, dtype=torch.int32, **there)
    y = w4a16.w4a16_moe(x, codes, scales, None, ids, fmt=NumberFormat.NVFP4)
    assert (y.device.index, gpus.launched, gpus.current) == (1, [(1, "stream of 1")] * 3, 0)


def test_triton_launches_there_too(gpus, monkeypatch):
    import torch

    def launched(*_, out, **__):
        gpus.launch("Triton")
        return out

    triton = SimpleNamespace(matmul=launched, moe=launched)
    monkeypatch.setitem(sys.modules, "requant.kernels.triton.w4a16", triton)
    monkeypatch.setattr(w4a16, "uses_triton", lambda _="auto": True)
    there = {"device": "cuda:1"}
    x = torch.empty(3, 256, dtype=torch.bfloat16, **there)
    codes, scales = (torch.empty(5, 32, width, dtype=torch.uint8, **there) for width in (128, 16))
    w4a16.w4a16_matmul(
        x, codes.new_empty(32, 128), scales.new_empty(32, 16), 1.0, fmt=NumberFormat.NVFP4, path="triton"
    )
    routing = w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32, **there), 3, 2, 5, triton=True)
    w4a16.w4a16_moe(x, codes, scales, None, fmt=NumberFormat.NVFP4, routing=routing, path="triton")
    assert (gpus.launched, gpus.current) == ([(1, "Triton")] * 2, 0)


def test_a_launch_that_fails_leaves_it_too(gpus, monkeypatch):
    import torch

    def refuse(*_):
        raise RuntimeError("refused")

    monkeypatch.setattr(w4a16_library, "launch", refuse)
    x = torch.empty(3, 256, dtype=torch.bfloat16, device="cuda:1")
    codes, scales = (torch.empty(32, width, dtype=torch.uint8, device="cuda:1") for width in (128, 16))
    with pytest.raises(RuntimeError, match="refused"):
        w4a16.w4a16_matmul(x, codes, scales, 1.0, fmt=NumberFormat.NVFP4)
    assert gpus.current == 0
