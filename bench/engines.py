"""The engines that the benches compare, each called as its own documentation says.

`save` returns when the engine lets training go on; `before_step` is what the engine's documentation
asks for before the optimizer changes what was saved. Peers other than torch's are used where they
can be imported and told apart as skipped where not:

    pip install --no-deps --target peers torchsnapshot nvidia-resiliency-ext \
        "importlib-metadata<8" zipp aiofiles nest-asyncio pyyaml
    PYTHONPATH=peers python bench/step.py
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import common

Tree = dict[str, Any]


class Live:
    """A GPT's parameters and an AdamW with the state that it has after a step, without making one.

    As modules and optimizers (`objects`), and as nested dicts of the same tensors (`tree`).
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Any], layers: int) -> None:
        import torch
        from torch import nn

        live = common.state(make, layers)
        named = {name.replace(".", "_"): nn.Parameter(t) for name, t in live["model"].items()}
        model = nn.ParameterDict(named)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
        states = optim.state
        for name, parameter in zip(live["model"], named.values(), strict=True):
            moments = {kind: live[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
            states[parameter] = {"step": torch.tensor(1.0), **moments}
        self.objects = {"model": model, "optim": optim}
        self._tree = {
            "model": {name: p.detach() for name, p in named.items()},
            "optim": {name: dict(states[p]) for name, p in named.items()},
        }

    def tree(self) -> Tree:
        return self._tree

    def change(self) -> None:
        """Change every tensor, as a step does."""
        for tensor in common.tensors(self._tree):
            tensor.mul_(1.001)

    def clear(self) -> None:
        for tensor in common.tensors(self._tree):
            tensor.zero_()

    def sums(self) -> list[int]:
        """Return what other bits would change."""
        return [zlib.crc32(t.numpy()) for t in common.tensors(self._tree)]


class Engine:
    """Saves one state again and again; keeps the two newest checkpoints.

    Parameters
    ----------
    tree
        Returns the state as nested dicts of tensors.
    objects
        The same state as modules and optimizers where there are some: what ckptd is given.
    """

    def __init__(
        self, folder: str, tree: Callable[[], Tree], objects: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.tree = tree
        self.durable = 0
        """Saves that the engine has called durable."""

    def path(self, step: int) -> str:
        return f"{self.folder}/{step}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def before_step(self) -> None:
        """Wait as documented before the state changes."""

    def poll(self) -> int:
        """Return how many saves are durable now."""
        return self.durable

    @property
    def skipped(self) -> int:
        """Saves that were asked for and not made."""
        return 0

    def wait(self) -> None:
        """Return when every save is durable."""

    def load(self, step: int) -> None:
        """Fill the live tensors."""
        import torch.distributed.checkpoint as dcp

        dcp.load(self.tree(), checkpoint_id=self.path(step))

    def clean(self, step: int) -> None:
        """Remove what is older than the checkpoint before `step`."""
        common.remove(self.path(step - 2))

    def close(self) -> None:
        self.wait()


class Nothing(Engine):
    """No checkpoints: what the loop's own noise is."""

    def save(self, step: int) -> None:
        self.durable += 1


class Ckptd(Engine):
    """Each save goes to the root."""

    options: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, folder: str, tree: Callable[[], Tree], objects: Mapping[str, Any] | None = None
    ) -> None:
        import ckptd

        super().__init__(folder, tree)
        self._objects = objects
        more: dict[str, Any] = dict(self.options)
        if "tiers" in more:
            os.environ["CKPTD_RUN_DIR"] = f"{folder}/run"
            more["tiers"] = [ckptd.Memory(every=1)]
        self._ck = ckptd.Checkpointer(f"{folder}/root", keep=2, **more)
        self._handles: list[ckptd.SaveHandle] = []

    def _state(self) -> Mapping[str, Any]:
        return self._objects or self.tree()

    def save(self, step: int) -> None:
        handle = self._ck.save(step, self._state())
        if handle is not None:
            self._handles.append(handle)

    def poll(self) -> int:
        return sum(h.done and h.error is None for h in self._handles)

    @property
    def skipped(self) -> int:
        return self._ck.skipped

    def wait(self) -> None:
        self._ck.wait()

    def load(self, step: int) -> None:
        self._ck.load(self._state(), step)

    def clean(self, step: int) -> None:
        pass  # `keep` does

    def close(self) -> None:
        self._ck.close()


class CkptdMemory(Ckptd):
    """Each save goes to the memory of the node's agent, one in ten to the root as well.

    Durable, then, is what survives the trainer.
    """

    options = MappingProxyType({"tiers": "memory", "every": 10})


class CkptdOneSlot(Ckptd):
    """Half of the shared memory: a save waits for the one before it."""

    def __init__(self, *arguments: Any) -> None:
        import ckptd

        self.options = {"copy": ckptd.CopyOptions(slots=1)}
        super().__init__(*arguments)


class Plain(Engine):
    """One file a checkpoint, written by the training process, synced, and given its name then."""

    name = ""

    def write(self, path: str) -> None:
        raise NotImplementedError

    def read(self, path: str) -> list[Any]:
        """Return the tensors of a file in the order of the live ones."""
        raise NotImplementedError

    def save(self, step: int) -> None:
        folder = Path(self.path(step))
        folder.mkdir()
        self.write(f"{folder}/new")
        common.sync(f"{folder}/new")
        os.rename(f"{folder}/new", f"{folder}/{self.name}")
        common.sync(str(folder))
        self.durable += 1

    def load(self, step: int) -> None:
        live = common.tensors(self.tree())
        for tensor, found in zip(live, self.read(f"{self.path(step)}/{self.name}"), strict=True):
            tensor.copy_(found)


class TorchSave(Plain):
    name = "state.pt"

    def write(self, path: str) -> None:
        import torch

        torch.save(self.tree(), path)

    def read(self, path: str) -> list[Any]:
        import torch

        return common.tensors(torch.load(path, mmap=True, weights_only=True))


class Safetensors(Plain):
    name = "state.safetensors"

    def write(self, path: str) -> None:
        from safetensors.torch import save_file

        save_file({str(i): t for i, t in enumerate(common.tensors(self.tree()))}, path)

    def read(self, path: str) -> list[Any]:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            return [file.get_tensor(str(i)) for i in range(len(file.keys()))]


class Dcp(Engine):
    """Its writer has as many threads as the machine cores; plans are kept from save to save."""

    def __init__(self, *arguments: Any) -> None:
        import torch.distributed.checkpoint as dcp

        super().__init__(*arguments)
        one_rank()
        self._planner = dcp.DefaultSavePlanner(enable_plan_caching=True)

    def _writer(self, step: int) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp.FileSystemWriter(self.path(step), thread_count=os.cpu_count() or 1)

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.tree(), storage_writer=self._writer(step), planner=self._planner)
        self.durable += 1


class DcpAsync(Dcp):
    """`process`: uploads in another process. `options`: a stager that is kept, by them."""

    process = False
    options: Mapping[str, bool] | None = None

    def __init__(self, *arguments: Any) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(*arguments)
        self._stager = self.options and DefaultStager(StagingOptions(**self.options))
        self._flying: Any = None
        self._staging: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.wait()
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        answer = dcp.async_save(
            self.tree(),
            storage_writer=self._writer(step),
            planner=self._planner,
            async_stager=self._stager,
            async_checkpointer_type=kind,
        )
        self._staging = getattr(answer, "staging_completion", None)
        self._flying = getattr(answer, "upload_completion", answer)

    def before_step(self) -> None:
        if self._staging is not None:
            self._staging.result()

    def poll(self) -> int:
        return self.durable + (self._flying is not None and self._flying.done())

    def wait(self) -> None:
        if self._flying is not None:
            self._flying.result()
            self._flying = None
            self.durable += 1

    def close(self) -> None:
        super().close()
        if self._stager:
            self._stager.close()


class DcpProcess(DcpAsync):
    process = True


class DcpFastest(DcpAsync):
    """Staged by a thread into shared memory that is kept: the least that DCP can block."""

    process = True
    options = MappingProxyType(
        {
            "use_pinned_memory": False,
            "use_shared_memory": True,
            "use_async_staging": True,
            "use_non_blocking_copy": False,
        }
    )


class TorchSnapshot(Engine):
    def __init__(self, *arguments: Any) -> None:
        import torchsnapshot

        super().__init__(*arguments)
        one_rank()
        self._library = torchsnapshot
        self._flying: Any = None

    def _app(self) -> dict[str, Any]:
        return {"s": self._library.StateDict(**self.tree())}

    def save(self, step: int) -> None:
        self.wait()
        self._flying = self._library.Snapshot.async_take(self.path(step), self._app())
        self._step = step

    def poll(self) -> int:
        return self.durable + (self._flying is not None and self._flying.done())

    def wait(self) -> None:
        if self._flying is not None:
            self._flying.wait()
            self._flying = None
            common.sync_folder(self.path(self._step))  # it syncs nothing
            self.durable += 1

    def load(self, step: int) -> None:
        self._library.Snapshot(self.path(step)).restore(self._app())


class Nvrx(Engine):
    """nvidia-resiliency-ext's asynchronous DCP writer with its persistent worker."""

    def __init__(self, *arguments: Any) -> None:
        pretend_cuda()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().__init__(*arguments)
        one_rank()
        self._calls = AsyncCallsQueue(persistent=True)
        self._flying = 0

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
            FileSystemWriterAsync,
        )

        self.wait()
        Path(self.path(step)).mkdir()
        writer = FileSystemWriterAsync(self.path(step), thread_count=2)
        planned = state_dict_saver.save_state_dict_async_plan(
            self.tree(), writer, None, 0, planner=dcp.DefaultSavePlanner()
        )
        planned = planned[0] if isinstance(planned[0], tuple) else planned
        act, preload, arguments = writer.get_save_function_and_args()
        done = [lambda: state_dict_saver.save_state_dict_async_finalize(*planned)]
        self._calls.schedule_async_request(
            AsyncRequest(act, tuple(arguments), done, preload_fn=preload)
        )
        self._flying = 1

    def _finalize(self, blocking: bool) -> None:
        ended = self._calls.maybe_finalize_async_calls(blocking=blocking, no_dist=False)
        self._flying -= len(ended)
        self.durable += len(ended)

    def poll(self) -> int:
        if self._flying:
            self._finalize(blocking=False)
        return self.durable

    def wait(self) -> None:
        if self._flying:
            self._finalize(blocking=True)

    def close(self) -> None:
        super().close()
        self._calls.close()


class NvrxTorch(Engine):
    """nvidia-resiliency-ext's asynchronous ``torch.save``."""

    def __init__(self, *arguments: Any) -> None:
        pretend_cuda()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().__init__(*arguments)
        one_rank()
        self._saver = TorchAsyncCheckpoint(persistent_queue=True)
        self._saves = 0

    def save(self, step: int) -> None:
        self.wait()
        Path(self.path(step)).mkdir()
        self._saver.async_save(self.tree(), f"{self.path(step)}/state.pt")
        self._saves += 1

    def _unfinished(self) -> int:
        unfinished: int = self._saver._async_calls_queue.get_num_unfinalized_calls()
        return unfinished

    def poll(self) -> int:
        self._saver.finalize_async_save(blocking=False)
        return self._saves - self._unfinished()

    def wait(self) -> None:
        if self._unfinished():
            self._saver.finalize_async_save(blocking=True)

    def load(self, step: int) -> None:
        import torch

        saved = common.tensors(torch.load(f"{self.path(step)}/state.pt"))
        for live, found in zip(common.tensors(self.tree()), saved, strict=True):
            live.copy_(found)

    def close(self) -> None:
        self._saver.finalize_async_save(blocking=True, terminate=True)


ENGINES: dict[str, type[Engine]] = {
    "ckptd": Ckptd,
    "ckptd, 1 slot": CkptdOneSlot,
    "ckptd memory tier": CkptdMemory,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP save": Dcp,
    "DCP async thread": DcpAsync,
    "DCP async process": DcpProcess,
    "DCP async process async staging": DcpFastest,
    "torchsnapshot async_take": TorchSnapshot,
    "NVRx async DCP": Nvrx,
    "NVRx async torch.save": NvrxTorch,
}


def timed_save(engine: Engine, step: int) -> tuple[float, float, float]:
    """Save; return what it blocked, when it was durable, and the CPU of all processes, seconds."""
    used, start = common.tree_cpu(), time.perf_counter()
    engine.save(step)
    blocked = time.perf_counter() - start
    engine.wait()
    return blocked, time.perf_counter() - start, common.tree_cpu() - used


def chosen(cases: str) -> list[str]:
    """Return the engines that a comma-separated list names."""
    names = cases.split(",")
    if unknown := set(names) - set(ENGINES):
        raise SystemExit(f"no such engine: {unknown}; there are {sorted(ENGINES)}")
    return names


def measured(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Leave out the disk and what could not be imported."""
    found = {n: [s for s in f if "skipped" not in s] for n, f in found.items() if n != "limit"}
    return {n: samples for n, samples in found.items() if samples}


def skipped(found: dict[str, list[dict[str, Any]]]) -> str:
    rows = {n: f[0]["skipped"] for n, f in found.items() if f and "skipped" in f[0]}
    return "".join(f"\n\nSkipped: {name} ({why})." for name, why in rows.items())


def tell(case: Callable[[], dict[str, Any]]) -> NoReturn:
    """Be the process of one case: print its figures, or why it is skipped, and end."""
    try:
        found = case()
    except ImportError as error:
        found = {"skipped": str(error)}
    print(json.dumps(found), flush=True)
    end_children()
    os._exit(0)  # what engines leave to the interpreter's exit may hang


PRETEND = "CKPTD_BENCH_PRETEND_CUDA"


def one_rank() -> None:
    """Form a process group of one: some engines call collectives unasked."""
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)


def pretend_cuda() -> None:
    """Make code that asks for a device unconditionally run without one, here and in children."""
    import torch

    os.environ[PRETEND] = "1"
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda device=None: None


def end_children() -> None:
    """End what an engine left behind, so that the next case has the machine to itself."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
