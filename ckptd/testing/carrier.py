"""`CarrierContract`: the tests that every carrier of published weights passes.

In it: the layouts, casts and quantization that it tries; dead publishers and workers; its time
limit.

A carrier's author subclasses it with one function of a module, which every rank calls with the
ranks of the default group that publish::

    def make(publishers: Sequence[int]) -> WeightCarrier:
        return MyCarrier(publishers, ...)


    class TestMyCarrier(CarrierContract):
        make = staticmethod(make)

The tests start real ranks, in which ``torch.distributed`` is initialised with gloo. Where these
need something else, devices for instance, what `play` returns starts them
(`ckptd.testing.ranks.rank_outcomes`), and `device` is where weights are.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ckptd.publish.carrier import SlotReader, WeightCarrier
from ckptd.testing.ranks import Play, rank_outcomes, result_of

__all__ = ["CarrierContract"]

Make = Callable[[Sequence[int]], WeightCarrier]

_LAYOUT = """
mesh A = t:2
mesh B = t:1
space s { w{i}[n m] u{i}[n m] v[n m] }
layout rows of s on A {
  w.{i} = w{i}[n@t m]
  u.{i} = u{i}[n@t m]
  v = v[n@t m]
}
layout turned of s on B {
  w.{i} = w{i}[m n] cast(bf16)
  u.{i} = u{i}[m n]
  v = v[n m] q(float8_e4m3fn, [64 100], scale={name}_scale)
}
"""
_ROWS, _COLUMNS, _COUNT = 96, 3000, 3
_PATIENCE_S = 60.0


class CarrierContract:
    """See the module."""

    make: ClassVar[staticmethod[[Sequence[int]], WeightCarrier]]
    device: ClassVar[str] = "cpu"
    play: ClassVar[staticmethod[[], Play] | None] = None

    def _outcomes(self, ranks: int, function: Callable[..., Any], at: Path) -> list[Any]:
        play = None if self.play is None else self.play()
        return rank_outcomes(
            ranks,
            function,
            self.make,
            str(at / "at"),
            self.device,
            deadline_s=200.0,
            grace_s=90.0,
            play=play,
        )

    @pytest.mark.timeout(300)
    def test_weights_arrive_cut_turned_cast_and_quantized(self, tmp_path: Path) -> None:
        """Two ranks publish two versions, another one has each of them."""
        done = result_of(self._outcomes(3, _versions, tmp_path), 200.0)
        assert done[2] == [True, True]

    @pytest.mark.timeout(300)
    def test_a_dead_publisher_leaves_the_version_before(self, tmp_path: Path) -> None:
        """A rank that is killed before its part is pulled is no error, and no mixture."""
        outcomes = self._outcomes(3, _killed, tmp_path)
        assert outcomes[1].exit_code == -signal.SIGKILL
        assert outcomes[2].value == [True, True], outcomes[2]

    @pytest.mark.timeout(300)
    def test_a_dead_worker_costs_the_others_nothing(self, tmp_path: Path) -> None:
        """A worker that is killed while it pulls: another one has that version, and the next."""
        outcomes = self._outcomes(4, _killed_worker, tmp_path)
        assert outcomes[2].exit_code == -signal.SIGKILL
        assert [outcomes[rank].value for rank in (0, 1, 3)] == [[True, True]] * 3, outcomes


def _weights(step: int, rank: int | None) -> dict[str, Any]:
    import torch

    whole = [
        torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).view(_ROWS, _COLUMNS) / 8 + step * i
        for i in range(1, _COUNT + 1)
    ]
    parts = whole if rank is None else [w.chunk(2)[rank].contiguous() for w in whole]
    more = {f"u.{i}": w * 3 for i, w in enumerate(parts)}
    return {f"w.{i}": w for i, w in enumerate(parts)} | more | {"v": parts[0].clone()}


def _held(step: int, rank: int, device: str) -> dict[str, Any]:
    return {name: tensor.to(device) for name, tensor in _weights(step, rank).items()}


def _holds(into: dict[str, Any], step: int) -> bool:
    import torch

    wanted = _weights(step, None)
    into = {name: tensor.cpu() for name, tensor in into.items()}
    whole = wanted.pop("v")
    for at in range(0, _ROWS, 64):  # a block lies on both ranks of the publisher
        blocks = whole[at : at + 64].view(-1, _COLUMNS // 100, 100)
        scales = blocks.abs().amax((0, 2)) / 448
        values = (blocks / scales[:, None]).to(torch.float8_e4m3fn).view(-1, _COLUMNS)
        same = torch.equal(into["v"][at : at + 64].view(torch.uint8), values.view(torch.uint8))
        if not same or not torch.equal(into["v_scale"][at // 64], scales):
            return False
    plain = {n: w.t().bfloat16() if n.startswith("w") else w.t() for n, w in wanted.items()}
    return all(torch.equal(into[n], w) for n, w in plain.items())


def _empty(device: str) -> dict[str, Any]:
    import torch

    into = {f"w.{i}": torch.zeros(_COLUMNS, _ROWS, dtype=torch.bfloat16) for i in range(_COUNT)}
    into |= {f"u.{i}": torch.zeros(_COLUMNS, _ROWS) for i in range(_COUNT)}
    into["v"] = torch.zeros(_ROWS, _COLUMNS, dtype=torch.float8_e4m3fn)
    into["v_scale"] = torch.zeros(-(-_ROWS // 64), _COLUMNS // 100)
    return {name: tensor.to(device) for name, tensor in into.items()}


def _versions(make: Make, at: str, device: str) -> list[bool]:
    import torch.distributed as dist

    import ckptd

    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
    carrier = make((0, 1))
    found = []
    if rank < 2:
        with ckptd.Publisher(
            f"# layout rows\n{_LAYOUT}", at, process_group=trainers, carrier=carrier
        ) as publisher:
            for step in (1, 2):
                publisher.publish(step, {"m": _held(step, rank, device)}).wait(_PATIENCE_S)
                dist.barrier()
                dist.barrier()
    else:
        into = _empty(device)
        layout = f"# layout turned\n{_LAYOUT}"
        with ckptd.Subscriber(layout, {"m": into}, at, carrier=carrier) as subscriber:
            for step in (1, 2):
                dist.barrier()
                report = subscriber.update(_PATIENCE_S)
                came = 0 if report is None else report.bytes_received + report.bytes_mapped
                good = report is not None and came == report.bytes_needed
                found.append(good and _holds(into, step))
                dist.barrier()
    carrier.close()
    return found


class _Fatal:
    """A reader that is killed with its process once it has read or mapped something."""

    def __init__(self, reader: SlotReader) -> None:
        self._reader = reader
        self.local = reader.local

    def ask(self, *question: Any) -> Any:
        return self._reader.ask(*question)

    def map(self, number: int) -> Any:
        mapped = self._reader.map(number)
        os.kill(os.getpid(), signal.SIGKILL)
        return mapped

    def reads(self, number: int, requests: Any) -> Iterator[Any]:
        for data in self._reader.reads(number, requests):
            os.kill(os.getpid(), signal.SIGKILL)
            yield data


class _FatalCarrier:
    """A worker's carrier with such readers."""

    def __init__(self, carrier: WeightCarrier) -> None:
        self._carrier = carrier

    def reader(self, giver: int, link: Any) -> SlotReader:
        return _Fatal(self._carrier.reader(giver, link))


def _killed_worker(make: Make, at: str, device: str) -> list[bool]:
    import torch.distributed as dist

    import ckptd

    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
    carrier: Any = make((0, 1))
    store = dist.distributed_c10d._get_default_store()
    found = []
    if rank < 2:
        with ckptd.Publisher(
            f"# layout rows\n{_LAYOUT}", at, process_group=trainers, carrier=carrier
        ) as publisher:
            for step in (1, 2):
                publication = publisher.publish(step, {"m": _held(step, rank, device)})
                found.append(publication.wait(_PATIENCE_S))
                store.set(f"published {step} {rank}", "")
                store.wait([f"had {step}"])
        return found
    into = _empty(device)
    used: Any = _FatalCarrier(carrier) if rank == 2 else carrier
    with ckptd.Subscriber(f"# layout turned\n{_LAYOUT}", {"m": into}, at, carrier=used) as to:
        for step in (1, 2):
            store.wait([f"published {step} {r}" for r in (0, 1)])
            if rank == 3 and step == 1:
                _gone_with(int(store.get("pid")))
            else:
                store.set("pid", str(os.getpid()))
            found.append(to.update(_PATIENCE_S) is not None and _holds(into, step))
            store.set(f"had {step}", "")
    return found


def _gone_with(pid: int) -> None:
    """Return when a process has ended."""
    end = time.monotonic() + _PATIENCE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":  # a zombie: dead, and not waited for yet
                return
            time.sleep(0.05)


def _killed(make: Make, at: str, device: str) -> list[bool]:
    import torch.distributed as dist

    import ckptd

    rank = dist.get_rank()
    trainers = dist.new_group([0, 1])
    carrier = make((0, 1))
    if rank < 2:
        publisher = ckptd.Publisher(
            f"# layout rows\n{_LAYOUT}", at, process_group=trainers, carrier=carrier
        )
        publisher.publish(1, {"m": _held(1, rank, device)}).wait(_PATIENCE_S)
        dist.barrier()
        dist.barrier()
        publisher.publish(2, {"m": _held(2, rank, device)}).wait(_PATIENCE_S)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)
        os._exit(0)
    into = _empty(device)
    layout = f"# layout turned\n{_LAYOUT}"
    with ckptd.Subscriber(layout, {"m": into}, at, carrier=carrier) as subscriber:
        dist.barrier()
        first = subscriber.update(_PATIENCE_S) is not None
        dist.barrier()
        dist.barrier()
        time.sleep(1.0)
        # Its server may still have all of it: then that version is there, whole.
        second = _holds(into, 1 if subscriber.update() is None else 2)
    return [first, second]
