"""A recorder in Python that has stepped aside takes its hooks away when nobody can be in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import programs

SCRIPT = """
import threading, torch, torch.distributed as dist
import ckptd.monitor

def hooked():
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)
tensor = torch.ones(2)
recorder = ckptd.monitor.attach()
optimizer.step()
work = dist.all_reduce(tensor, async_op=True)
recorder.aside(RuntimeError("broken"))
assert hooked()

go = threading.Event()
other = threading.Thread(target=go.wait)
other.start()
optimizer.step()
assert hooked(), "another thread may be in a call"
go.set()
other.join()

weight = torch.ones(2, requires_grad=True)
weight.register_hook(lambda grad: optimizer.step())
weight.sum().backward()
assert hooked(), "a backward pass may make calls"

optimizer.step()
assert not hooked()
work.wait()
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0, 1.0]
ckptd.monitor.step(1)
ckptd.monitor.detach()

recorder = ckptd.monitor.attach()
assert recorder.on and hooked()
dist.all_reduce(tensor)
recorder.aside(RuntimeError("broken"))
ckptd.monitor.step(2)
assert not hooked()
ckptd.monitor.detach()
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_hooks_go_at_the_next_step_of_a_rank_without_other_threads(tmp_path: Path) -> None:
    env = os.environ | {"CKPTD_RINGS": str(tmp_path), "CKPTD_RECORDER": "python"}
    done = programs.run("-c", SCRIPT, env=env)
    assert done.returncode == 0, done.stderr
