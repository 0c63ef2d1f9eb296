"""One process publishes and one pulls: what travels, what is refused, what a restart changes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import ckptd
from ckptd import events
from ckptd.base.digest import digest
from ckptd.base.net.handed import FromLauncher
from ckptd.base.net.tls import hand
from ckptd.base.runtime.channel import SocketChannel
from ckptd.base.runtime.priority import LAST
from ckptd.checkpoint.save.arena import Slot
from ckptd.elastic.workerend import LauncherEnd
from ckptd.errors import CkptdError, CorruptError, MismatchError, StoreError, UsageError
from ckptd.lay.bind import FilledGlobs, with_globs
from ckptd.publish.client import PublishClient
from ckptd.publish.link import ServerLink
from ckptd.publish.messages import (
    ORDER,
    REPLY,
    AskChanged,
    AskHold,
    AskSlot,
    ChangedBlocks,
    HoldAnswer,
    Opening,
    PublishedAbout,
    PublishedTensor,
    SetTensors,
    SlotAnswer,
    SlotMemory,
    VersionSealed,
    VersionWhole,
    check_about,
)
from ckptd.publish.pull import _MOST_UNKNOWN, StagedPull, _Giver
from ckptd.publish.server import PublishServer
from ckptd.reshard.layouts import read_text
from tests.processes import PATIENCE_S, lives, until
from tests.reshard.torch.layout.jobs import PROGRAM, Tree, differing, whole
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused

CHANGED = "layers.1.o.weight"


class Pair:
    """A publisher and a subscriber of one model, `far` as if on two hosts."""

    def __init__(self, at: Path, *, far: bool = False) -> None:
        self.at = at
        self.full = whole(1)
        self.publisher = ckptd.Publisher(WHOLE, at)
        self.into = Tree(fused(whole(99)))
        self.subscriber = ckptd.Subscriber(FUSED, self.into, at)
        self.subscriber._far = far
        self.step = 0
        self.link: ServerLink | None = None

    def publish(self) -> None:
        self.step += 1
        publication = self.publisher.publish(self.step, {"model": self.full})
        assert publication.wait(PATIENCE_S)

    def update(self) -> Any:
        report = self.subscriber.update(wait_s=30)
        assert report is not None
        assert report.version.step == self.step
        self.check()
        return report

    def hold(self, number: int) -> int:
        """Publish, and hold that version with a connection of its own."""
        self.publish()
        entry = self.subscriber._place.find()
        assert entry is not None
        self.link = ServerLink.to(entry, self.subscriber._place.proof)
        assert self.link.ask(AskHold(number), HoldAnswer).good
        return number

    def check(self) -> None:
        assert differing(dict(self.into.state_dict()), fused(self.full)) == []

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.subscriber.close()
        self.publisher.close()


@pytest.fixture(params=["near", "far"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path / "at", far=request.param == "far")
    yield found
    found.close()


def test_only_what_changed_travels(pair: Pair) -> None:
    every = sum(t.nbytes for t in fused(pair.full).values())
    pair.publish()
    assert pair.update().bytes_needed == every
    pair.full[CHANGED] = pair.full[CHANGED] + 1
    pair.publish()
    report = pair.update()
    assert report.bytes_needed == pair.full[CHANGED].nbytes
    assert report.bytes_needed + report.bytes_unchanged == every
    moved = report.bytes_received + report.bytes_mapped  # of a socket at most so many
    assert 0 < moved <= report.bytes_needed
    assert pair.subscriber._far or moved == report.bytes_needed
    pair.publish()
    # The same values under another step. What changed is not looked after until it rests.
    assert pair.update().bytes_needed == pair.full[CHANGED].nbytes
    pair.publish()
    assert pair.update().bytes_needed == 0


def test_connections_end_after_an_error_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames had what reads from a connection, which kept the lock that the end waits for."""
    pair = Pair(tmp_path / "at", far=True)
    try:
        pair.publish()
        with monkeypatch.context() as broken, pytest.raises(CorruptError) as held:
            broken.setattr("ckptd.publish.link.incoming_digest", lambda *_: b"another")
            pair.subscriber.update(wait_s=30)
        ending = threading.Thread(target=pair.subscriber._disconnect, daemon=True)
        ending.start()
        ending.join(PATIENCE_S / 4)
        assert not ending.is_alive()
        assert held.value.__traceback__ is not None
        pair.update()
    finally:
        pair.close()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are of threads on Linux alone")
def test_a_trainer_goes_before_what_is_sent_to_other_hosts(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "at", far=True)
    try:
        pair.publish()
        pair.update()
        tasks = Path(f"/proc/{pair.publisher.server_pid}/task")
        nices = [int(t.read_text().rpartition(")")[2].split()[16]) for t in tasks.glob("*/stat")]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # Its orders come at the priority of the rank, which waits for the answers.
        assert min(nices) == own
        assert nices.count(min(19, own + LAST)) >= 2  # the leader's connection, and the bytes
    finally:
        pair.close()


def test_what_rests_is_seen_where_digests_are_always_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has nothing to leave out asks at once, and pulled all of it for ever."""
    pair = Pair(tmp_path / "at")
    every = sum(t.nbytes for t in fused(pair.full).values())
    ask = ServerLink.ask

    def late(link: ServerLink, question: Any, *rest: Any) -> Any:
        if isinstance(question, AskChanged) and not question.wait_s:
            return ChangedBlocks(False, 1, ())
        return ask(link, question, *rest)

    monkeypatch.setattr(ServerLink, "ask", late)
    moved = []
    try:
        for step in range(_MOST_UNKNOWN + 5):
            for name in pair.full if step < 2 else [CHANGED]:
                pair.full[name] = pair.full[name] + 1
            pair.publish()
            moved.append(pair.update().bytes_needed)
    finally:
        pair.close()
    # Once more where it is seen that all has changed, and as often without knowing.
    assert moved == [every] * (_MOST_UNKNOWN + 3) + [pair.full[CHANGED].nbytes] * 2


def test_of_a_large_tensor_the_blocks_that_changed_travel(tmp_path: Path) -> None:
    layout = "mesh O = x:1\nspace s { A[a b] }\nlayout one of s on O { a.weight = A[a b] }\n"
    turned = layout.replace("= A[a b]", "= A[b a]")
    full = {"a.weight": torch.randn(2048, 1024)}
    into = {"a.weight": torch.zeros(1024, 2048)}
    with (
        ckptd.Publisher(layout, tmp_path / "at") as publisher,
        ckptd.Subscriber(turned, {"m": into}, tmp_path / "at") as subscriber,
    ):
        needed = []
        for _ in range(3):
            publisher.publish(1, {"model": full}).wait(PATIENCE_S)
            report = subscriber.update(wait_s=30)
            assert report is not None
            assert torch.equal(into["a.weight"], full["a.weight"].t())
            needed.append(report.bytes_needed)
            full["a.weight"][1000:1003] += 1.0
        assert needed[0] == 8 << 20
        assert needed[1:] == [1 << 18] * 2


def test_digests_that_were_taken_while_a_slot_was_filled_again_are_of_no_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    server = PublishServer(SocketChannel(theirs, ORDER))
    slot = Slot(0, 4)
    server._do(SetTensors((PublishedTensor("a", "float32", 0, 1),)), None)
    server._do(SlotMemory(0, 4), os.dup(slot.fd))
    digests: list[bytes] = []

    def slow(data: memoryview) -> bytes:
        if not digests:
            slot.begin(2)  # as a trainer does with a slot that no worker holds
            slot.data[:] = b"new "
        digests.append(digest(data))
        return digests[-1]

    monkeypatch.setattr("ckptd.publish.blocks.digest", slow)
    slot.begin(1)
    slot.data[:] = b"old "
    slot.seal()
    for number in (1, 2):
        server._do(VersionSealed(number, 0), None)
        with server._digested:
            assert server._digested.wait_for(lambda n=number: n not in server._pending, 30.0)
        slot.seal()
    assert len(digests) == 2
    assert list(server._digests) == [2]  # else a worker that has "old " takes it for "new "
    server._end()
    ours.close()
    slot.close()


def test_what_was_proved_of_an_earlier_version_is_forgotten(pair: Pair) -> None:
    pair.publish()
    pair.update()
    pair.publish()
    pair.update()
    part = pair.into.get_parameter("norm.weight")
    first = part.detach().clone()
    pair.full["norm.weight"] = pair.full["norm.weight"] + 1
    pair.publish()
    look = _Giver.look
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Giver, "look", lambda *_: None)  # the server knows no digests
        pair.update()
    part.data.copy_(first)  # not counted by torch
    pair.publish()
    assert _Giver.look is look
    pair.update()


def test_an_answer_about_other_blocks_than_a_tensor_has_is_refused(pair: Pair) -> None:
    pair.publish()
    pair.update()
    pair.publish()
    ask = ServerLink.ask

    def lies(link: ServerLink, question: Any, kind: Any, wait_s: float | None = None) -> Any:
        found = ask(link, question, kind, wait_s)
        if isinstance(found, ChangedBlocks):
            return msgspec.structs.replace(found, bits=tuple(b"" for _ in found.bits))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerLink, "ask", lies)
        with pytest.raises(CkptdError) as caught:
            pair.subscriber.update(wait_s=30)
    assert "protocol error: unexpected reply" in caught.value.message
    assert not caught.value.state_corrupted
    pair.update()


def test_events_and_lag(tmp_path: Path) -> None:
    found: list[Any] = []
    pair = Pair(tmp_path / "at")
    with contextlib.closing(pair), contextlib.closing(events.subscribe(found.append, inline=True)):
        pair.publish()
        report = pair.update()
        pair.subscriber._leader.ask(AskHold(1), HoldAnswer)
        held = pair.hold(2)
        pair.step = 6
        skipped = pair.publisher.publish(7, {"model": pair.full})
    assert held == 2
    assert "2 are held" in skipped.skipped
    assert not skipped.wait()
    kinds = [(type(e).__name__, e.step, e.number) for e in found]
    assert kinds == [
        ("VersionPublished", 1, 1),
        ("VersionApplied", 1, 1),
        ("VersionPublished", 2, 2),
        ("VersionPublished", 7, 3),
    ]
    assert found[0].bytes >= report.bytes_needed == found[1].bytes
    assert found[1].lag_ns >= found[1].duration_ns > 0
    assert found[3].skipped == skipped.skipped


def test_a_slot_is_waited_for_as_long_as_that_is_asked_for(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "at")
    with contextlib.closing(pair):
        pair.publish()
        pair.update()
        pair.subscriber._leader.ask(AskHold(1), HoldAnswer)
        pair.hold(2)
        state = {"model": pair.full}
        assert pair.publisher.publish(3, state, wait_s=0.5).skipped
        release = threading.Timer(0.5, pair.subscriber._let_go)
        release.start()
        assert pair.publisher.publish(4, state, wait_s=30.0).wait(PATIENCE_S)
        release.join()


def test_a_worker_that_lost_its_values_gets_them_again(pair: Pair) -> None:
    pair.publish()
    pair.update()
    part = pair.into.get_parameter("head.weight")
    with torch.no_grad():
        part[3, 4] += 1  # counted by torch
    pair.publish()
    assert pair.update().bytes_needed == part.nbytes
    part.data[5, 6] = 7.0  # not counted
    pair.publish()
    assert pair.update().bytes_needed == part.nbytes
    part.detach().numpy()[0, 0] = 8.0
    pair.publish()
    assert pair.update().bytes_needed == part.nbytes
    part.data = torch.zeros_like(part)  # other memory, as an engine that slept and woke has
    pair.publish()
    assert pair.update().bytes_needed == part.nbytes
    kept = part.data.clone()
    part.data.zero_()
    part.data = kept  # the same values elsewhere: not taken for the old ones
    pair.publish()
    assert pair.update().bytes_needed == part.nbytes


def test_a_step_that_is_published_twice_and_a_restart_are_other_versions(pair: Pair) -> None:
    pair.publish()
    pair.update()
    pair.full = whole(2)
    pair.step -= 1
    pair.publish()
    first = pair.update()
    assert (first.version.step, first.version.number) == (1, 2)
    pair.publisher.close()
    pair.publisher = ckptd.Publisher(WHOLE, pair.at)
    pair.full = whole(3)
    pair.step = 0
    pair.publish()
    second = pair.update()
    assert (second.version.step, second.version.number) == (1, 1)
    assert second.version.epoch != first.version.epoch
    assert pair.subscriber.version == second.version


def test_nothing_newer_and_nobody_there(tmp_path: Path) -> None:
    into = Tree(fused(whole(99)))
    with ckptd.Subscriber(FUSED, into, tmp_path / "at") as subscriber:
        assert subscriber.update() is None
        with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
            assert subscriber.update() is None  # it has published nothing
            publisher.publish(1, {"model": whole(1)}).wait(PATIENCE_S)
            assert subscriber.update() is not None
            assert subscriber.update() is None
    assert differing(dict(into.state_dict()), fused(whole(1))) == []


def refused(at: Path, layout: str, into: Any, **options: Any) -> CkptdError:
    """Return what an update raises; the tensors are as they were."""
    before = {n: t.clone() for n, t in into.state_dict().items()}
    with ckptd.Subscriber(layout, into, at, **options) as subscriber:
        subscriber._far = True
        with pytest.raises(CkptdError) as caught:
            subscriber.update(wait_s=30)
        assert subscriber.version is None
    assert differing(dict(into.state_dict()), before) == []
    assert not caught.value.state_corrupted
    return caught.value


def test_what_does_not_fit_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    at = tmp_path / "at"
    with ckptd.Publisher(WHOLE, at) as publisher:
        publisher.publish(1, {"model": whole(1)}).wait(PATIENCE_S)
        large = {
            n: torch.cat([t, t]) if "embed" in n or n == "head.weight" else t
            for n, t in fused(whole(2)).items()
        }
        error = refused(at, FUSED.replace("let v = 20", "let v = 40"), Tree(large))
        assert isinstance(error, MismatchError)
        assert "v" in str(error)
        assert "40" in str(error)
        half = fused(whole(2))
        half["norm.weight"] = half["norm.weight"].half()
        error = refused(at, FUSED, Tree(half))
        assert (error.kind, error.where) == ("lay-fit", "norm.weight")
        other = "mesh O = x:1\nspace mlp { A[a b] }\nlayout one of mlp on O { a.weight = A[a b] }\n"
        error = refused(at, other, Tree({"a.weight": torch.zeros(3, 4)}))
        assert isinstance(error, MismatchError)
        assert "A" in str(error)
        error = refused(at, FUSED, Tree(fused(whole(2))), budget_bytes=1000)
        assert isinstance(error, UsageError)
        assert "a version pulled over sockets does not fit budget_bytes" in error.message
        error = refused(at, FUSED, Tree(fused(whole(2))), secret="some random text")
        assert isinstance(error, StoreError)
        assert error.kind == "permission"


def test_processes_without_the_secret_prove_themselves_by_their_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTD_SECRET", raising=False)
    secret = "a secret of no digits, but long"
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        launcher = LauncherEnd(
            Path(short) / "l.sock", lambda *_: None, hand=lambda asked: hand(secret, "n1", asked)
        )
        monkeypatch.setenv("CKPTD_LAUNCHER", str(launcher.path))
        pair = Pair(tmp_path / "at", far=True)
        try:
            assert pair.subscriber._place.proof == FromLauncher()
            for _ in range(2):
                pair.publish()
                pair.update()
            error = refused(pair.at, FUSED, Tree(fused(whole(2))), secret="some random text")
            assert error.kind == "permission"
            into = Tree(fused(whole(3)))
            with ckptd.Subscriber(FUSED, into, pair.at, secret=secret) as another:
                another._far = True  # one with the secret itself, on another machine
                assert another.update(wait_s=30) is not None
            assert not (pair.at / "publisher-secret").exists()
        finally:
            pair.close()
            launcher.close()


def test_a_publisher_refuses_what_it_cannot_publish(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ckptd.Publisher(WHOLE, "s3://bucket/at")
    assert "invalid address of a publisher" in caught.value.message
    with pytest.raises(UsageError) as caught:
        ckptd.Publisher(WHOLE, "tcp://127.0.0.1:0", "short")
    assert "the secret has the wrong length" in caught.value.message
    numbers: list[dict[str, Any]] = [
        {"slots": 1},
        {"slots": 2.5},
        {"slots": "3"},
        {"lease_s": -1},
        {"lease_s": float("nan")},
        {"budget_bytes": -1},
    ]
    for number in numbers:
        with pytest.raises(UsageError):
            ckptd.Publisher(WHOLE, tmp_path / "at", **number)
    with ckptd.Publisher(WHOLE, tmp_path / "at", budget_bytes=1000) as publisher:
        with pytest.raises(UsageError) as caught:
            publisher.publish(1, {"model": whole(1)})
        assert "this rank's tensors do not fit budget_bytes" in caught.value.message
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        some = {n: t for n, t in whole(1).items() if "layers" not in n}
        with pytest.raises(MismatchError) as caught:  # what workers would miss
            publisher.publish(1, {"model": some})
        assert "no shape determines" in caught.value.message
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        publisher.publish(1, {"model": whole(1)}).wait(PATIENCE_S)
        with pytest.raises(UsageError) as caught:
            publisher.publish(2, {"model": {n: t.double() for n, t in whole(1).items()}})
        assert "the state's tensors differ from those of the first publish" in caught.value.message
        # The slot of step 2 is free.
        assert publisher.publish(3, {"model": whole(1)}).wait(PATIENCE_S)
        for step in ("x", 1.5, -3, True, 2**70, None):  # the server would end at what is no integer
            with pytest.raises(UsageError, match="invalid step"):
                publisher.publish(step, {"model": whole(1)})  # type: ignore[arg-type]
        at = np.int64(1796000000000)  # milliseconds since 1970, as of verl
        last = publisher.publish(at, {"model": whole(1)})  # type: ignore[arg-type]
        assert (last.step, last.wait(PATIENCE_S)) == (at, True)


def test_no_number_is_no_wait_for_a_slot(tmp_path: Path) -> None:
    with ckptd.Publisher(WHOLE, tmp_path / "at") as publisher:
        none = SlotAnswer(2, -1, False, "no slot is free")
        publisher._client.place = lambda number, step: none  # type: ignore[method-assign]
        assert publisher._placed(2, float("nan")).slot < 0


def test_what_a_rank_sent_before_it_died_counts(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    rank, slot = SocketChannel(ours, REPLY), Slot(0, 64)
    run = str(tmp_path)
    rank.send(Opening("e", 0, 1, b"s" * 32, "127.0.0.1", 0, run, 2, 60.0, 0.0))
    rank.send(SlotMemory(0, 64), slot.fd)
    rank.send(AskSlot(1, 7))
    slot.begin(1)
    slot.seal()
    rank.send(VersionSealed(1, 0))
    rank.send(VersionWhole(1))
    rank.close()  # no answer is read any more
    server = PublishServer(SocketChannel(theirs, ORDER))
    server.run()
    assert server._book.newer(0)[:2] == (1, 7)
    assert not list(tmp_path.iterdir())
    slot.close()


CASTS = f"""# layout half
{PROGRAM}
mesh O = x:1
layout half of llama on O {{
  embed.weight = E[v h] cast(bf16)
  layers.{{l}}.qkv.weight = L{{l}}[h (kv (q:rep|k:1|v:1) hd)] cast(bf16)
  layers.{{l}}.o.weight = L{{l}}.o[(kv rep hd) h] cast(bf16)
  layers.{{l}}.gu.weight = L{{l}}[(f (g:1|u:1)) h] cast(f16)
  layers.{{l}}.down.weight = L{{l}}.d[h f] cast(f32)
  layers.{{l}}.norm.weight = L{{l}}.n1[h] cast(bf16)
  norm.weight = nf[h] cast(f64)
  head.weight = head[v h] cast(bf16)
}}
"""


def cast(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transpose, interleave and cast by torch alone."""
    out = {}
    for name, tensor in fused(full).items():
        kind = name.split(".")[-2]
        if kind in ("qkv", "o"):
            tensor = tensor.t().contiguous()
        if kind == "gu":
            tensor = tensor.view(2, 12, 16).transpose(0, 1).reshape(24, 16).half()
        elif name == "norm.weight":
            tensor = tensor.double()
        elif kind != "down":
            tensor = tensor.bfloat16()
        out[name] = tensor
    return out


@pytest.mark.parametrize("far", [False, True])
def test_transposed_interleaved_and_cast(tmp_path: Path, far: bool) -> None:
    into = Tree(cast(whole(9)))
    with (
        ckptd.Publisher(WHOLE, tmp_path / "at") as publisher,
        ckptd.Subscriber(CASTS, into, tmp_path / "at") as subscriber,
    ):
        subscriber._far = far
        publisher.publish(1, {"model": whole(1)}).wait(PATIENCE_S)
        report = subscriber.update(wait_s=30)
        assert report is not None
        wanted = cast(whole(1))
        assert differing(dict(into.state_dict()), wanted) == []
        # Cast by the sender where that is less; norm.weight, 16 values, grows at the receiver.
        assert report.bytes_needed == sum(t.nbytes for t in wanted.values()) - 16 * 4
        if far:
            assert report.bytes_received == report.bytes_needed


def test_more_than_the_budget_is_written_as_it_comes_if_that_is_asked_for(tmp_path: Path) -> None:
    into = Tree(fused(whole(99)))
    with (
        ckptd.Publisher(WHOLE, tmp_path / "at") as publisher,
        ckptd.Subscriber(
            FUSED, into, tmp_path / "at", budget_bytes=5000, in_place=True
        ) as subscriber,
    ):
        subscriber._far = True
        publisher.publish(1, {"model": whole(1)}).wait(PATIENCE_S)
        report = subscriber.update(wait_s=30)
        assert report is not None
        assert differing(dict(into.state_dict()), fused(whole(1))) == []
        assert report.bytes_received == report.bytes_needed > 3 * 5000
        assert report.staged_bytes == 0
        changed = whole(1) | {CHANGED: whole(2)[CHANGED]}
        publisher.publish(2, {"model": changed}).wait(PATIENCE_S)
        assert subscriber.update(wait_s=30).bytes_needed == changed[CHANGED].nbytes
        assert differing(dict(into.state_dict()), fused(changed)) == []

        publisher.publish(3, {"model": whole(3)}).wait(PATIENCE_S)
        read = ServerLink.read
        calls = []

        def breaks(link: ServerLink, *more: Any) -> Any:
            calls.append(more)
            if len(calls) == 3:
                link._connection.close()
            return read(link, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerLink, "read", breaks)
            with pytest.raises(CkptdError) as caught:
                subscriber.update(wait_s=30)
        assert caught.value.state_corrupted
        assert subscriber.version is None
        assert subscriber.update(wait_s=30).bytes_unchanged == 0
        assert subscriber.version.step == 3
        assert differing(dict(into.state_dict()), fused(whole(3))) == []


@pytest.mark.parametrize("far", [False, True])
def test_a_value_that_does_not_fit_its_type_is_found_before_anything_is_written(
    tmp_path: Path, far: bool
) -> None:
    full = whole(1)
    into = Tree(cast(whole(9)))
    before = {n: t.clone() for n, t in into.state_dict().items()}
    with (
        ckptd.Publisher(WHOLE, tmp_path / "at") as publisher,
        ckptd.Subscriber(CASTS, into, tmp_path / "at") as subscriber,
    ):
        subscriber._far = far
        full["layers.2.up.weight"][5, 5] = 1e6  # a float16 ends at 65504
        publisher.publish(1, {"model": full}).wait(PATIENCE_S)
        with pytest.raises(UsageError) as caught:
            subscriber.update(wait_s=30)
        assert "a value does not fit the type it is cast" in caught.value.message
        assert not caught.value.state_corrupted
        assert differing(dict(into.state_dict()), before) == []
        publisher.publish(2, {"model": whole(2)}).wait(PATIENCE_S)
        assert subscriber.update(wait_s=30) is not None
        assert differing(dict(into.state_dict()), cast(whole(2))) == []


SAME_SIZE = """
mesh O = x:1
space s { A[a b] B[a b] }
layout trainer of s on O {
  a = A[a b]
  b = B[a b]
}
layout rollout of s on O {
  a = A[a b] cast(f16)
  b = B[a b] cast(f16)
}
"""


@pytest.mark.parametrize(
    ("kind", "to_kind"), [(torch.bfloat16, torch.float16), (torch.float32, torch.int32)]
)
def test_a_value_that_does_not_fit_is_found_where_the_sender_does_not_cast(
    tmp_path: Path, kind: torch.dtype, to_kind: torch.dtype
) -> None:
    full = {n: torch.ones(8, 8, dtype=kind) for n in "ab"}
    into = {n: torch.zeros(8, 8, dtype=to_kind) for n in "ab"}
    full["b"][3, 3] = 1e10
    program = SAME_SIZE.replace("f16", str(to_kind).removeprefix("torch."))
    with (
        ckptd.Publisher(f"# layout trainer\n{program}", tmp_path / "at") as publisher,
        ckptd.Subscriber(f"# layout rollout\n{program}", {"m": into}, tmp_path / "at") as to,
    ):
        to._far = True
        publisher.publish(1, {"m": full}).wait(PATIENCE_S)
        with pytest.raises(UsageError) as caught:
            to.update(wait_s=30)
    assert (caught.value.message, caught.value.state_corrupted) == (
        "a value does not fit the type it is cast to",
        False,
    )
    assert not into["a"].any()


TIED = """
mesh A = t:1
mesh B = t:1
space s { E[v h] X{e}.g[f h] X{e}.u[f h] }
layout src of s on A {
  embed.weight = E[v h]
  head.weight = alias E
  experts.{e}.gate.weight = X{e}.g[f h]
  experts.{e}.up.weight = X{e}.u[f h]
}
layout dst of s on B {
  embed.weight = E[v h]
  lm.weight = alias E
  w13 = X[e (g:f|u:f) h]
}
"""


def test_tied_embeddings_and_stacked_experts(tmp_path: Path) -> None:
    embed = torch.randn(6, 4)
    parts = {f"experts.{e}.{n}.weight": torch.randn(3, 4) for e in range(4) for n in ("gate", "up")}
    full = {"embed.weight": embed, "head.weight": embed, **parts}
    into = {n: torch.zeros(6, 4) for n in ("embed.weight", "lm.weight")}
    into["w13"] = torch.zeros(4, 6, 4)
    at = tmp_path / "at"
    with (
        ckptd.Publisher(f"# layout src\n{TIED}", at, budget_bytes=2 * 640) as publisher,
        ckptd.Subscriber(f"# layout dst\n{TIED}", {"m": into}, at) as subscriber,
    ):
        publisher.publish(1, {"m": full}).wait(PATIENCE_S)  # of the tied tensor a slot has one copy
        assert subscriber.update(wait_s=30) is not None
    assert torch.equal(into["embed.weight"], embed)
    assert torch.equal(into["lm.weight"], embed)
    stacked = [
        torch.cat([parts[f"experts.{e}.gate.weight"], parts[f"experts.{e}.up.weight"]])
        for e in range(4)
    ]
    assert torch.equal(into["w13"], torch.stack(stacked))


def test_a_publisher_that_cannot_listen_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PublishClient] = []

    class Noted(PublishClient):
        def __init__(self, *options: Any) -> None:
            super().__init__(*options)
            made.append(self)

    monkeypatch.setattr("ckptd.publish.torch.publisher.PublishClient", Noted)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError) as caught:
            ckptd.Publisher(WHOLE, f"tcp://127.0.0.1:{taken.getsockname()[1]}", "some random text")
        assert caught.value.kind == "listen"
    until(lambda: not lives(made[0].pid), "the server's end")


def test_a_fifo_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "publisher.json")
    with ckptd.Subscriber(FUSED, Tree(fused(whole(99))), tmp_path) as subscriber:
        assert subscriber.update() is None


GLOBS = """
mesh O = x:1
space s { L{l}.g[f h] n[h] }
layout trainer of s on WHERE {
  enc.**.{l}.gate.weight = L{l}.g[f h] ENC
  **.{l}.*.weight = L{l}.g[f h] DEC
  *.norm.weight = n[h]
  nothing.**.weight = n[h]
}
layout rollout of s on O {
  **.{l}.gate.w = L{l}.g[f h]
  norm.* = n[h]
}
"""


@pytest.mark.parametrize("where", ["O", "none"])
def test_names_with_globs_are_those_that_the_trainer_and_the_worker_have(
    tmp_path: Path, where: str
) -> None:
    # Names of whole tensors say themselves which numbers a rule has.
    first, others = ("", "") if where == "none" else ("for l=0", "for l=1..")
    program = GLOBS.replace("WHERE", where).replace("ENC", first).replace("DEC", others)
    last = "dec.c.2.gate.weight" if where == "none" else "dec.b.2.up.weight"
    names = ["enc.a.0.gate.weight", "dec.b.1.up.weight", last]
    full = {n: torch.randn(4, 3) for n in names} | {"model.norm.weight": torch.randn(3)}
    into = {f"m.{i}.gate.w": torch.zeros(4, 3) for i in range(3)} | {"norm.w": torch.zeros(3)}
    with (
        ckptd.Publisher(f"# layout trainer\n{program}", tmp_path / "at") as publisher,
        ckptd.Subscriber(f"# layout rollout\n{program}", {"m": into}, tmp_path / "at") as to,
    ):
        assert publisher.publish(1, {"m": full}).wait(PATIENCE_S)
        assert to.update(wait_s=30) is not None
    for found, wanted in zip(into.values(), full.values(), strict=True):
        assert torch.equal(found, wanted)


def test_what_globs_stand_for_is_checked_against_the_program() -> None:
    program = GLOBS.replace("WHERE", "O").replace("ENC", "").replace("DEC", "")
    resolved = read_text(f"# layout rollout\n{program}", "test").resolve()
    good = FilledGlobs(0, ("m.",), {})
    assert len(with_globs(resolved, [good]).equations) == 1
    for wrong in (good._replace(rule=9), good._replace(texts=()), good._replace(texts=("a", "b"))):
        with pytest.raises(UsageError) as caught:
            with_globs(resolved, [wrong])
        assert caught.value.kind == "lay-use"


def test_what_workers_would_not_take_is_refused_where_it_is_published() -> None:
    about = PublishedAbout("", 1, "", {}, tuple((0, (f"m.{i}",), {}) for i in range(50_000)))
    check_about(about)  # as many names as experts have
    many, long = (0, ("m",), {}), (0, ("m" * 4000,), {})
    for wrong in (
        {"globs": (many,) * (1 << 18)},
        {"globs": (long,) * 5000},
        {"layout": "m" * 2**21},
    ):
        with pytest.raises(UsageError) as caught:
            check_about(msgspec.structs.replace(about, **wrong))
        assert caught.value.kind == "lay-use"


def test_a_subscriber_keeps_no_tensor_that_its_engine_has_freed(tmp_path: Path) -> None:
    layout = "mesh O = x:1\nspace s { A[a b] }\nlayout one of s on O { a.weight = A[a b] }\n"
    full = {"a.weight": torch.randn(64, 32)}
    state: dict[str, torch.Tensor] = {}

    def wake() -> weakref.ref[Any]:
        memory = np.zeros((64, 32), np.float32)
        state["a.weight"] = torch.from_numpy(memory)
        return weakref.ref(memory)

    first = wake()
    with (
        ckptd.Publisher(layout, tmp_path / "at") as publisher,
        ckptd.Subscriber(layout, {"m": state}, tmp_path / "at") as subscriber,
    ):
        for step in (1, 2, 3):
            publisher.publish(step, {"model": full}).wait(PATIENCE_S)
            assert subscriber.update(wait_s=30) is not None
            assert torch.equal(state["a.weight"], full["a.weight"])
            plan = subscriber._plan
            state.clear()  # as an engine that sleeps
            gc.collect()
            assert first() is None
            first = wake()
            assert subscriber._plan is plan  # other memory needs no other plan


def test_why_an_update_failed_keeps_nothing_of_what_was_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path / "at", far=True)
    staged: list[weakref.ref[StagedPull]] = []
    room, read = StagedPull.room, ServerLink.read

    def noted(pull: StagedPull, size: int) -> Any:
        staged.append(weakref.ref(pull))
        return room(pull, size)

    def breaks(link: ServerLink, *more: Any) -> Any:
        link._connection.close()
        return read(link, *more)

    monkeypatch.setattr(StagedPull, "room", noted)
    try:
        pair.publish()
        with monkeypatch.context() as patch:
            patch.setattr(ServerLink, "read", breaks)
            assert pair.subscriber.update() is None
        assert pair.subscriber.last_error is not None
        assert pair.subscriber.last_error.kind == "link-lost"
        gc.collect()
        assert [r() for r in staged] == [None]
        pair.update()
        assert pair.subscriber.last_error is None
    finally:
        pair.close()
