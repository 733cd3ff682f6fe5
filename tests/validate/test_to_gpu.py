"""Tensors that go to a GPU in pieces arrive whole, in memory of their own, whatever their size and dtype."""

import pytest
import torch
from requant.validate.to_gpu import Transfer


@pytest.mark.parametrize(
    ("device", "pieces"), [("cpu", None), ("cpu", True), pytest.param("cuda", None, marks=pytest.mark.gpu)]
)
def test_pieces_through_two_buffers_are_the_tensor(device, pieces):
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(300, 70, generator=made).t()]
    for shape in ((7,), (), (0, 3), (3, 1000), (5, 7, 311), (2, 4096), (1, 1000)):
        tensors.append(torch.randint(0, 256, shape, dtype=torch.uint8, generator=made))
        tensors += [torch.randn(shape, generator=made).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    transfer = Transfer(device, 1000, pieces=pieces)
    moved = [transfer.copy(tensor) for tensor in tensors]
    for tensor, there in zip(tensors, moved, strict=True):
        assert (there.dtype, there.device.type) == (tensor.dtype, device)
        assert torch.equal(there.cpu(), tensor)
        assert tensor.numel() == 0 or there.data_ptr() != tensor.data_ptr()


def test_a_buffer_waits_for_the_stream_of_the_gpu_that_fetches_it(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    class Event:
        def record(self, stream=None):
            seen.append(stream or "the current GPU's stream")

        def synchronize(self):
            seen.append("waited")

    seen = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    for name in ("__getitem__", "copy_", "view", "reshape"):  # torch's own want the device there
        monkeypatch.setattr(FakeTensor, name, lambda whole, *_, **__: whole)
    with FakeTensorMode():
        Transfer("cuda:1", 1000).copy(torch.empty(2500, dtype=torch.uint8))
    assert seen == ["waited", "stream of cuda:1"] * 3
