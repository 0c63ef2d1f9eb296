"""Accelerators played by the CPU, for scripts that insist on some; set up by the environment alone.

``import torch`` loads this in every process that has the folder of `environment` on its
``PYTHONPATH``. Devices of any number are the CPU then, and ``nccl`` is gloo. Random numbers begin
with one seed, and after each step of an optimizer a digest of what it optimizes is written down, so
that two runs can be compared to the bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

__all__ = ["DIGESTS", "autoload", "environment"]

DIGESTS = "STANDIN_DIGESTS"
DEVICES = 4
_ENTRY = "[torch.backends]\nzz_standin = tests.examples_watched.standin:autoload\n"


def environment(folder: Path, digests: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Return variables for processes that are to have the devices; writes metadata to `folder`."""
    place = folder / "standin-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 0\n")
    (place / "entry_points.txt").write_text(_ENTRY)
    digests.mkdir(parents=True, exist_ok=True)
    repo = str(Path(__file__).resolve().parents[2])
    before = base.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), repo, before))),
        DIGESTS: str(digests),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def autoload() -> None:
    """Play the devices. Called by ``import torch``."""
    if DIGESTS not in os.environ:
        return
    import torch
    from torch.distributed import distributed_c10d
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.manual_seed(7)
    cpu = torch.device("cpu")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_accelerator": lambda *_, **__: cpu,
        "set_device_index": lambda *_: None,
        "device_index": lambda *_: None,
    }.items():
        setattr(torch.accelerator, name, value)
    torch.cuda.set_device = lambda *_: None
    torch.cuda.device_count = lambda: DEVICES
    torch.Tensor.to = _numbered(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.nn.Module.to = _numbered(torch.nn.Module.to)  # type: ignore[method-assign]
    init = DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, device_ids: Any = None, **more: Any) -> None:
        init(self, module, **more)

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]
    join = distributed_c10d.init_process_group

    @wraps(join)
    def on_cpu(backend: Any = None, *args: Any, device_id: Any = None, **more: Any) -> None:
        join("gloo" if backend in ("nccl", None) else backend, *args, **more)

    distributed_c10d.init_process_group = torch.distributed.init_process_group = on_cpu
    register_optimizer_step_post_hook(_write_down)


def _numbered(to: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to)
    def moved(self: Any, *args: Any, **more: Any) -> Any:
        if args and isinstance(args[0], int):
            args = ("cpu", *args[1:])
        return to(self, *args, **more)

    return moved


def _write_down(optimizer: Any, args: Any, kwargs: Any) -> None:
    told = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = getattr(parameter, "_local_tensor", parameter).detach().float().contiguous()
            told.update(local.numpy().tobytes())
    path = Path(os.environ[DIGESTS]) / f"rank-{os.environ.get('RANK', '')}-{_rank()}"
    with path.open("a") as file:
        file.write(told.hexdigest() + "\n")


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else -1
