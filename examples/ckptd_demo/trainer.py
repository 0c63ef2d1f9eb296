"""A rank of the training job; torchrun starts it. The loop is what a user of ckptd would write.

A digest of the whole training state is made in a way that ckptd has no part in: torch's own
collectives gather the tensors, and rank 0 hashes them. What was in memory at a save can so be
compared with what is in memory after a load on other ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import ckptd
from ckptd.crashes import report_crashes
from ckptd.decoding import json_decoder
from ckptd.errors import MismatchError, UsageError
from ckptd_demo.data import SampleOrder, read_corpus
from ckptd_demo.model import build, cut_model
from ckptd_demo.spec import ProcessRow, RunSpec, SnapshotRow, StateRow, StepRow

__all__ = ["Job", "digest_state", "main", "train"]

_specs = json_decoder(RunSpec)

_LINGER_S = 2.0
"""Lives of the demo end by themselves or by a kill; the next one goes on from the disk."""


class Job:
    """Model, optimizer, schedule and data position of one rank."""

    def __init__(self, spec: RunSpec) -> None:
        if spec.batch % spec.cut.dp:
            raise UsageError(
                "the batch cannot be shared out evenly",
                wanted=f"a multiple of {spec.cut.dp}",
                found=spec.batch,
            )
        self.spec = spec
        self.model = build(spec.shape, spec.seed)
        self.data_mesh = cut_model(self.model, spec.cut)
        # foreach wants all parameters on one mesh; those without tensor parallelism are not.
        self.optimizer = AdamW(
            self.model.parameters(),
            spec.learning_rate,
            (0.9, 0.95),
            weight_decay=0.1,
            foreach=False,
        )
        self.schedule = LambdaLR(self.optimizer, lambda step: _rate(step, spec))
        self.corpus = read_corpus()
        self.order = SampleOrder(self.corpus.windows(spec.shape.seq), spec.seed)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optim": self.optimizer,
            "sched": self.schedule,
            "rng": ckptd.Rng(),
            "data": {"position": 0, "seed": spec.seed, "corpus": self.corpus.digest},
            "step": 0,
        }

    @property
    def data(self) -> dict[str, Any]:
        """Position in the samples, their seed, and the digest of the text."""
        data: dict[str, Any] = self.state["data"]
        return data

    def step(self) -> tuple[float, list[int]]:
        """Train on the next global batch; return its loss and the ids of all its samples."""
        ids = self.order.ids(self.data["position"], self.spec.batch)
        ranks, rank = self.data_mesh.size(), self.data_mesh.get_local_rank()
        share = self.spec.batch // ranks
        mine = ids[rank * share : (rank + 1) * share]
        seq = self.spec.shape.seq
        samples = torch.stack([torch.from_numpy(self.corpus.sample(i, seq)) for i in mine])
        loss = self.model(samples) / (self.spec.batch * seq)
        # FSDP averages gradients over the data-parallel ranks; each has its share of one mean.
        (loss * ranks).backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.data["position"] += self.spec.batch
        self.state["step"] += 1
        total = loss.detach().double()
        distributed.all_reduce(total, group=self.data_mesh.get_group())
        return float(total), ids

    def check_data(self) -> None:
        """Refuse to go on with another text than the one that the loaded position is about."""
        if self.data["corpus"] != self.corpus.digest:
            raise MismatchError(
                "the text is not the one that training began with",
                wanted=self.data["corpus"],
                found=self.corpus.digest,
                hint="resume with the Python that started the run",
            )

    def digest(self, event: str) -> StateRow:
        """Return digests of the whole state; a collective."""
        plain = {"schedule": _plain(self.schedule), "data": self.data, "step": self.state["step"]}
        return digest_state(event, self.state["step"], self.model, self.optimizer, plain)


def train(spec: RunSpec) -> None:
    """Run one life of the job, up to step `spec.until`."""
    job = Job(spec)
    reports = _Reports(spec)
    handles: list[ckptd.SaveHandle] = []
    with ExitStack() as stack:
        checkpointer = _open(spec, stack)
        if checkpointer is not None:
            reports.process(checkpointer.writer_pid)
            if checkpointer.latest() is not None:
                checkpointer.load(job.state)
                job.check_data()
                reports.state(job.digest("loaded"))
                _save_again(spec, job)
        while job.state["step"] < spec.until:
            loss, ids = job.step()
            reports.step(job, loss, ids)
            if checkpointer is None or (spec.pace and job.state["step"] // spec.pace % 2 == 0):
                continue
            if spec.throttle is not None and job.state["step"] % spec.every == 0:
                # Ranks whose slow saves pile up drift apart by a whole save, and what is under
                # way at the kill would be left to luck.
                checkpointer.wait(timeout=spec.timeout_s)
            handle = checkpointer.save(job.state["step"], job.state)
            if not handle:
                continue
            reports.process(checkpointer.writer_pid)
            handles.append(handle)
            if handle.root:
                reports.state(job.digest("saved"))
        if checkpointer is not None:
            checkpointer.wait()
            reports.snapshots(handles)


def _open(spec: RunSpec, stack: ExitStack) -> ckptd.Checkpointer | None:
    if spec.root is None:
        return None
    checkpointer = ckptd.Checkpointer(
        spec.root,
        every=ckptd.Every(steps=spec.every),
        tiers=[ckptd.Memory(every=1, agent_ttl_s=_LINGER_S)] if spec.snapshots else (),
        timeout_s=spec.timeout_s,
        storage=ckptd.Storage(throttle=spec.throttle),
    )
    return stack.enter_context(checkpointer)


def _save_again(spec: RunSpec, job: Job) -> None:
    """Write what was loaded to a root of its own, from the layout that it was loaded into."""
    if spec.check_root is None:
        return
    with ckptd.Checkpointer(spec.check_root, timeout_s=spec.timeout_s) as checkpointer:
        checkpointer.save(job.state["step"], job.state).durable(timeout=spec.timeout_s)


class _Reports:
    """Appends to the run's files; a line is one write, so a kill leaves no half of it."""

    def __init__(self, spec: RunSpec) -> None:
        self._files = spec.files
        self._rank = distributed.get_rank()
        self._begun = time.monotonic()
        self._process: ProcessRow | None = None

    def step(self, job: Job, loss: float, ids: list[int]) -> None:
        if self._rank == 0:
            rate = float(job.schedule.get_last_lr()[0])
            seconds = time.monotonic() - self._begun
            row = StepRow(job.state["step"], loss, tuple(ids), rate, seconds)
            _append(self._files.steps, row)

    def state(self, row: StateRow) -> None:
        if self._rank == 0:
            _append(self._files.states, row)

    def snapshots(self, handles: list[ckptd.SaveHandle]) -> None:
        if self._rank == 0:
            found = [h.tiers["memory"] for h in handles if "memory" in h.tiers]
            _append(self._files.snapshots, SnapshotRow(len(found), found.count("complete")))

    def process(self, writer_pid: int | None) -> None:
        row = ProcessRow(self._rank, os.getpid(), writer_pid)
        if row != self._process:
            self._process = row
            _append(self._files.processes, row)


def _append(path: Path, row: msgspec.Struct) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, msgspec.json.encode(row) + b"\n")
    finally:
        os.close(descriptor)


def _rate(step: int, spec: RunSpec) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < spec.warmup:
        return (step + 1) / spec.warmup
    done = min(1.0, (step - spec.warmup) / max(1, spec.steps - spec.warmup))
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def _plain(schedule: LambdaLR) -> dict[str, Any]:
    state: dict[str, Any] = schedule.state_dict()
    return {key: value for key, value in state.items() if isinstance(value, (int, float, list))}


def main() -> NoReturn:
    """Join the process group that torchrun describes and train as the file in argv says."""
    report_crashes()
    spec = _specs.decode(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=spec.timeout_s))
    train(spec)
    distributed.destroy_process_group()
    # Not a return: a gloo thread may still be letting go of a tensor, and one that asks for the
    # interpreter's lock while the interpreter ends aborts the process, with all work done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def digest_state(
    event: str, step: int, model: nn.Module, optimizer: Optimizer, plain: dict[str, Any]
) -> StateRow:
    """Return digests of the parameters, of the optimizer's moments and of everything else.

    A collective: every rank calls it, and each gets the same row.

    Parameters
    ----------
    plain
        What is not a tensor, as JSON values.
    """
    tensors: dict[str, str] = {}
    nbytes = 0
    for name, tensor in _tensors(model, optimizer):
        raw = _whole(tensor).numpy().tobytes()
        header = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
        tensors[name] = hashlib.sha256(header + raw).hexdigest()
        nbytes += len(raw)
    everything = {**plain, "groups": _hyperparameters(optimizer)}
    text = msgspec.json.encode(everything, order="sorted")
    return StateRow(event, step, nbytes, tensors, hashlib.sha256(text).hexdigest())


def _tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"{name}/{key}", value


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().contiguous()


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


if __name__ == "__main__":
    main()
