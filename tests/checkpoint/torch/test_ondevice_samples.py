"""What is sampled beside the copies; the arithmetic is the same on every device."""

from __future__ import annotations

import pytest
import torch

from ckptd.checkpoint.torch.ondevice import (
    MOST_WATCHED,
    DeviceLane,
    DeviceSamples,
    FirstBytesWatch,
    device_bytes,
)
from ckptd.checkpoint.torch.replicas import Samples, sample_digest


class HostLane(DeviceLane):
    """Brings to the host what is there already."""

    def __init__(self) -> None:
        pass

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def tensors() -> dict[str, torch.Tensor]:
    square = torch.randn(70, 71)
    complex_ = torch.randn(20, 21, dtype=torch.complex64)
    return {
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3.0),
        "whole": torch.arange(1024.0),
        "sampled": torch.arange(1025.0),
        "large": torch.randn(123457),
        "bytes": torch.arange(4097).to(torch.uint8),
        "transposed": square.t(),
        "conj": complex_.conj(),
        "bfloat16": torch.randn(5000).bfloat16(),
        "columns": torch.randn(70, 5, 71).bfloat16()[3:, 1:4, 7:],
        "bytes of columns": torch.arange(20000).to(torch.uint8).reshape(40, 500)[:, 3:411],
        "float8 transposed": torch.randn(70, 71).to(torch.float8_e4m3fn).t(),
        "steps": torch.randn(99, 99, dtype=torch.complex128)[::2, 1::3],
        "steps of conj": complex_.conj()[:, ::2].repeat(9, 9)[:, ::2],
        "expanded": torch.randn(1, 71).expand(70, 71),
    }


@pytest.mark.parametrize("name", tensors())
def test_digests_are_those_of_the_host(name: str) -> None:
    tensor = tensors()[name]
    plain = device_bytes(tensor).clone().view(tensor.dtype).view(tensor.shape)
    others = [torch.arange(9.0), torch.randn(5000)]
    taken = DeviceSamples()
    taken.take([others[0]])
    taken.take([tensor, others[1]])
    taken.fetch(HostLane())
    samples = Samples()
    taken.give(samples)
    for each, wanted in zip([*others, tensor], [*others, plain], strict=True):
        digest = sample_digest(wanted)
        each.data.fill_(1)
        assert samples(each) == digest, "it is of the time when it was taken"


def test_a_view_is_sampled_without_a_copy_of_it() -> None:
    """No machine has the memory for one."""
    row = torch.randn(1, 512)
    views = [row.expand(1 << 40, 512), row.t().expand(512, 1 << 40)]
    taken = DeviceSamples()
    taken.take(views)
    taken.fetch(HostLane())
    samples = Samples()
    taken.give(samples)
    assert [samples(view) for view in views] == [sample_digest(view) for view in views]
    assert sample_digest(views[0]) != sample_digest(views[1])


def test_nothing_to_sample_is_fine() -> None:
    taken = DeviceSamples()
    taken.take([])
    taken.fetch(HostLane())
    taken.give(Samples())


@pytest.mark.parametrize("count", [1, 5, MOST_WATCHED, 5 * MOST_WATCHED + 1])
def test_a_change_that_torch_does_not_count_is_seen(count: int) -> None:
    live = {f"w{i:04}": torch.full((i % 7 + 1, 33), float(i)) for i in range(count)}
    calm, moved = FirstBytesWatch(live), FirstBytesWatch(live)
    calm.look_again(HostLane())
    assert calm.changed() == []
    for tensor in live.values():
        tensor.data.add_(1.0)
    moved.look_again(HostLane())
    found = moved.changed()
    assert set(found) <= set(live)
    assert min(count, MOST_WATCHED) // 2 <= len(found) <= MOST_WATCHED


def test_only_what_changed_is_named() -> None:
    live = {f"w{i}": torch.full((100,), float(i)) for i in range(9)}
    watch = FirstBytesWatch(live)
    live["w4"].data[10] = -1.0
    watch.look_again(HostLane())
    assert watch.changed() == ["w4"]
    FirstBytesWatch({}).look_again(HostLane())
