"""Pipelines: by hand, in the orders of Megatron, and by PyTorch's own schedules."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.monitor.corpus.base import WIDTH, net, pause, program, rank, rounds, world

MICRO = 6


class Stage:
    """A stage that takes and hands on; each way of talking is a method of its own."""

    def __init__(self) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.first, self.last = rank() == 0, rank() == world() - 1
        self.open: list[tuple[Tensor, Tensor]] = []

    def recv_forward(self) -> Tensor:
        if self.first:
            return torch.randn(2, WIDTH, requires_grad=True)
        x = torch.empty(2, WIDTH)
        dist.recv(x, rank() - 1)
        return x.requires_grad_()

    def send_forward(self, y: Tensor) -> None:
        if not self.last:
            dist.send(y.detach(), rank() + 1)

    def recv_backward(self) -> Tensor | None:
        if self.last:
            return None
        grad = torch.empty(2, WIDTH)
        dist.recv(grad, rank() + 1)
        return grad

    def send_backward(self, grad: Tensor | None) -> None:
        if not self.first and grad is not None:
            dist.send(grad, rank() - 1)

    def forward(self, x: Tensor) -> Tensor:
        pause(0.002)
        y: Tensor = self.model(x)
        self.open.append((x, y))
        return y

    def backward(self, grad: Tensor | None) -> Tensor | None:
        x, y = self.open.pop(0)
        if grad is None:
            y.sum().backward()
        else:
            y.backward(grad)
        return x.grad

    def both(self, y: Tensor | None, grad: Tensor | None, **want: bool) -> list[Tensor]:
        """Send and receive at once, as one batch."""
        ends, got = [], []
        if y is not None and not self.last:
            ends.append(dist.P2POp(dist.isend, y.detach(), rank() + 1))
        if grad is not None and not self.first:
            ends.append(dist.P2POp(dist.isend, grad, rank() - 1))
        if want.get("backward") and not self.last:
            got.append(torch.empty(2, WIDTH))
            ends.append(dist.P2POp(dist.irecv, got[-1], rank() + 1))
        if want.get("forward") and not self.first:
            got.append(torch.empty(2, WIDTH))
            ends.append(dist.P2POp(dist.irecv, got[-1], rank() - 1))
        if ends:
            for work in dist.batch_isend_irecv(ends):
                work.wait()
        return got


@program()
def pipeline_fill_and_drain() -> None:
    stage = Stage()
    for _ in rounds():
        for _ in range(MICRO):
            stage.send_forward(stage.forward(stage.recv_forward()))
        for _ in range(MICRO):
            stage.send_backward(stage.backward(stage.recv_backward()))
        stage.optimizer.step()
        stage.optimizer.zero_grad()


@program()
def pipeline_1f1b() -> None:
    stage = Stage()
    warm = min(world() - rank() - 1, MICRO)
    for _ in rounds():
        for _ in range(warm):
            stage.send_forward(stage.forward(stage.recv_forward()))
        for _ in range(MICRO - warm):
            y = stage.forward(stage.recv_forward())
            # Begun, and not waited for: the next stage may be sending the other way.
            sent = None if stage.last else dist.isend(y.detach(), rank() + 1)
            stage.send_backward(stage.backward(stage.recv_backward()))
            if sent is not None:
                sent.wait()
        for _ in range(warm):
            stage.send_backward(stage.backward(stage.recv_backward()))
        stage.optimizer.step()
        stage.optimizer.zero_grad()


@program()
def pipeline_1f1b_batched() -> None:
    """Send forward and receive backward in one batch, and with a norm over all stages."""
    stage = Stage()
    warm = min(world() - rank() - 1, MICRO)
    for _ in rounds():
        for _ in range(warm):
            stage.send_forward(stage.forward(stage.recv_forward()))
        x = stage.recv_forward() if warm < MICRO else None
        for i in range(MICRO - warm):
            assert x is not None
            y = stage.forward(x)
            got = stage.both(y, None, backward=True)
            grad = stage.backward(got[0] if got else None)
            more = i < MICRO - warm - 1
            got = stage.both(None, grad, forward=more)
            x = got[0].requires_grad_() if got else torch.randn(2, WIDTH, requires_grad=True)
        for _ in range(warm):
            stage.send_backward(stage.backward(stage.recv_backward()))
        norm = torch.stack([p.grad.norm() for p in stage.model.parameters()]).square().sum()
        dist.all_reduce(norm)
        stage.optimizer.step()
        stage.optimizer.zero_grad()


@program()
def pipeline_interleaved_by_hand() -> None:
    """Two chunks of layers a rank, so that a micro-batch passes each rank twice."""
    chunks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    to, source = (rank() + 1) % world(), (rank() - 1) % world()
    for _ in rounds():
        for _ in range(3):
            for number, chunk in enumerate(chunks):
                if rank() == 0 and number == 0:
                    x = torch.randn(2, WIDTH)
                else:
                    x = torch.empty(2, WIDTH)
                    dist.recv(x, source)
                y = chunk(x).detach()
                if not (rank() == world() - 1 and number == 1):
                    dist.send(y, to)
                pause(0.002)


@program()
def pipeline_with_tied_embedding() -> None:
    """First and last stage reduce the gradient of what they share, in a group of two."""
    stage = Stage()
    ends = dist.new_group([0, world() - 1])
    for _ in rounds():
        for _ in range(2):
            stage.send_forward(stage.forward(stage.recv_forward()))
        for _ in range(2):
            stage.send_backward(stage.backward(stage.recv_backward()))
        if stage.first or stage.last:
            dist.all_reduce(stage.model.weight.grad, group=ends)
        stage.optimizer.step()
        stage.optimizer.zero_grad()


def _scheduled(name: str) -> None:
    from torch.distributed import pipelining

    schedule: type = getattr(pipelining, name)
    many = 2 if "Interleaved" in name else 1
    parts = [net(i) for i in range(many)]
    stages = [
        pipelining.PipelineStage(part, rank() + i * world(), many * world(), torch.device("cpu"))
        for i, part in enumerate(parts)
    ]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], 1e-3)
    loss = nn.MSELoss()
    made = schedule(stages if many > 1 else stages[0], n_microbatches=world(), loss_fn=loss)
    for _ in rounds():
        given = (torch.randn(2 * world(), WIDTH),) if rank() == 0 else ()
        more = {"target": torch.zeros(2 * world(), WIDTH)} if rank() == world() - 1 else {}
        made.step(*given, **more)
        optimizer.step()
        optimizer.zero_grad()


@program()
def torch_pipelining_1f1b() -> None:
    _scheduled("Schedule1F1B")


@program()
def torch_pipelining_interleaved() -> None:
    _scheduled("ScheduleInterleaved1F1B")


@program()
def torch_pipelining_gpipe() -> None:
    _scheduled("ScheduleGPipe")
