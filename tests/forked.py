"""What a forked child does with each object of its parent: `python -m tests.forked FOLDER [all]`.

Prints a line of JSON for each object and action: how the child ended, and what the parent then
found of its object.
"""

from __future__ import annotations

import gc
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import ckptd
import ckptd.monitor
from ckptd import events
from ckptd.base.runtime.channel import SocketChannel
from ckptd.checkpoint.format.names import CommitName, lease_key
from ckptd.checkpoint.root.index import Index
from ckptd.checkpoint.root.leases import hold, leases
from ckptd.elastic.messages import FromWorker, Out
from ckptd.elastic.worker import WorkerLink
from ckptd.elastic.workerend import LauncherEnd
from ckptd.errors import UsageError
from ckptd.store import open_store
from ckptd.store.memory import MemoryStore
from ckptd.store.net import StoreServer
from tests.reshard.torch.layout.jobs import Tree, whole
from tests.reshard.torch.layout.test_binder import FUSED, WHOLE, fused

ACTIONS = ("use", "close", "leave", "gc", "exit", "end", "pool", "process", "loader")
SOME = ("use", "leave", "exit")
"""Of the objects beside the checkpointer, without ``all``."""
WORKS = frozenset({"netstore", "recorder", "events", "fresh-batches"})
"""What a child may use: it has its own, or disregards what is its parent's."""
_WAIT_S = 60.0


class Subject:
    """One object, how a child and the parent use it, and how it is let go of."""

    def __init__(
        self,
        made: Any,
        use: Callable[[Any], object],
        check: Callable[[], object],
        close: Callable[[Any], object] = lambda made: made.close(),
    ) -> None:
        self.made, self.use, self.check, self.close = made, use, check, close


def _model() -> dict[str, Any]:
    model = torch.nn.Linear(64, 64)
    return {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}


def _fill(state: dict[str, Any], value: float) -> None:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(value)


def _checkpointer(url: str, stack: ExitStack, **more: Any) -> Subject:
    ck = stack.enter_context(ckptd.Checkpointer(url, **more))
    state = {**_model(), "at": 0.0}
    at = 0

    def save(number: int) -> None:
        ck.before_mutation()
        _fill(state, number)
        state["at"] = float(number)
        ck.save(number, state).durable(_WAIT_S)

    def check() -> None:
        nonlocal at
        at += 1
        save(at)
        found = {**_model(), "at": -1.0}
        with ckptd.Checkpointer(url) as other:
            step = other.load(found, only="*")
        assert step == at == found["at"], (step, at, found["at"])
        assert all(bool((p == at).all()) for p in found["model"].parameters())

    check()
    return Subject(ck, lambda ck: ck.save(1000 + at, state).durable(_WAIT_S), check)


def _handle(folder: Path, stack: ExitStack) -> Subject:
    ck = stack.enter_context(ckptd.Checkpointer(str(folder / "handles")))
    handle = ck.save(1, _model())

    def check() -> None:
        handle.durable(_WAIT_S)
        assert handle.done

    return Subject(
        handle, lambda handle: handle.durable(_WAIT_S), check, lambda handle: handle.done
    )


def _publisher(folder: Path, stack: ExitStack, *, which: str) -> Subject:
    full = whole(1)
    publisher = stack.enter_context(ckptd.Publisher(WHOLE, folder / which))
    subscriber = ckptd.Subscriber(FUSED, Tree(fused(whole(99))), folder / which)
    stack.enter_context(subscriber)
    step = 0

    def check() -> None:
        nonlocal step
        step += 1
        assert publisher.publish(step, {"model": full}).wait(_WAIT_S)
        report = subscriber.update(wait_s=_WAIT_S)
        assert report is not None
        assert report.version.step == step

    check()
    if which == "publisher":
        return Subject(publisher, lambda p: p.publish(100, {"model": full}), check)
    return Subject(subscriber, lambda s: s.update(), check)


def _link(folder: Path, stack: ExitStack) -> Subject:
    heard: list[Any] = []
    end = LauncherEnd(folder / "s", lambda worker, said: heard.append(said))
    stack.callback(end.close)
    os.environ["CKPTD_LAUNCHER"] = str(end.path)
    WorkerLink._tried = 0
    link = WorkerLink.current()
    assert link is not None
    del os.environ["CKPTD_LAUNCHER"]
    stack.callback(link.close)
    at = 0

    def check() -> None:
        nonlocal at
        at += 1
        link.committed(0, at)
        until = time.monotonic() + _WAIT_S
        while not any(getattr(said, "step", -1) == at for said in heard):
            assert time.monotonic() < until, heard
            time.sleep(0.01)
        assert not any(getattr(said, "step", -1) == 1000 for said in heard), "the child's"
        assert None not in heard, "the link was lost"

    check()
    return Subject(link, lambda link: link.committed(0, 1000), check)


def _batches(stack: ExitStack, *, begun: bool, workers: int) -> Subject:
    loader = (
        torch.utils.data.DataLoader(
            torch.arange(100_000), batch_size=1, num_workers=workers, multiprocessing_context="fork"
        )
        if workers
        else torch.utils.data.DataLoader(torch.arange(100_000), batch_size=1)
    )
    data = ckptd.Batches(loader)
    at = 0

    def check() -> None:
        nonlocal at
        if begun:
            assert int(next(data)) == at
            at += 1

    check()
    return Subject(data, next, check, lambda data: None)


def _netstore(folder: Path, stack: ExitStack) -> Subject:
    server = stack.enter_context(
        StoreServer(MemoryStore("memory://forked"), f"ckptd+unix://{folder}/n")
    )
    store = open_store(server.url)
    stack.callback(store.close)
    at = 0

    def put(name: str) -> None:
        store.put(name, name.encode())
        assert store.get(name) == name.encode()

    def check() -> None:
        nonlocal at
        at += 1
        put(f"parent-{at}")

    check()
    return Subject(store, lambda store: put(f"child-{os.getpid()}"), check)


def _recorder(folder: Path, stack: ExitStack) -> Subject:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "CKPTD_RECORDER": "python"}
    recorder = ckptd.monitor.attach(folder / "rings", job="forked")
    stack.callback(ckptd.monitor.detach)
    at = 0

    def check() -> None:
        nonlocal at
        at += 1
        recorder.step(at)
        assert recorder.on
        assert recorder.ring.current_step == at

    check()
    return Subject(recorder, lambda recorder: recorder.step(1000), check, lambda r: r.stop())


def _events(folder: Path, stack: ExitStack) -> Subject:
    recording = events.record(folder / "events")
    stack.callback(recording.close)
    at = 0

    def emit(step: int) -> None:
        events.emit(
            events.SaveSkipped(step=step, generation=1, rank=0, at_ns=events.now_ns(), reason="x")
        )

    def check() -> None:
        nonlocal at
        at += 1
        emit(at)
        assert recording.flush()
        files = sorted((folder / "events").glob(f"*-{os.getpid()}-*"))
        lines = [json.loads(x) for file in files for x in file.read_text().splitlines()]
        mine = [x["step"] for x in lines if x.get("event") == "SaveSkipped"]
        assert mine == [*range(1, at + 1)], mine

    check()
    return Subject(recording, lambda recording: emit(1000), check)


def _lease(folder: Path, stack: ExitStack) -> Subject:
    store = open_store(str(folder / "leased"))
    stack.callback(store.close)
    with ckptd.Checkpointer(str(folder / "leased")) as ck:
        ck.save(1, _model())
    index = Index(store)
    lease = stack.enter_context(hold(index, CommitName(1, 1)))

    def check() -> None:
        assert lease_key(lease.lease_id) in leases(index)

    return Subject(lease, lambda lease: lease.renew(), check, lambda lease: lease.release())


def _channel(stack: ExitStack) -> Subject:
    ours, theirs = socket.socketpair()
    channel, other = SocketChannel(ours, FromWorker), SocketChannel(theirs, FromWorker)
    stack.callback(channel.close)
    stack.callback(other.close)
    at = 0

    def check() -> None:
        nonlocal at
        at += 1
        channel.send(Out(at))
        item = other.receive(_WAIT_S)
        assert item is not None
        assert item[0] == Out(at)

    def use(channel: Any) -> None:
        try:
            channel.send(Out(1000))
        except ckptd.CkptdError:
            raise UsageError("closed", kind="forked") from None

    return Subject(channel, use, check)


@contextmanager
def subjects(folder: Path) -> Iterator[dict[str, Subject]]:
    """Make one of each."""
    with ExitStack() as stack:
        yield {
            "link": _link(folder, stack),
            "checkpointer": _checkpointer(str(folder / "root"), stack, preemption=True),
            "in-thread": _checkpointer("memory://forked-root", stack),
            "handle": _handle(folder, stack),
            "publisher": _publisher(folder, stack, which="publisher"),
            "subscriber": _publisher(folder, stack, which="subscriber"),
            "batches": _batches(stack, begun=True, workers=0),
            "worked-batches": _batches(stack, begun=True, workers=1),
            "fresh-batches": _batches(stack, begun=False, workers=0),
            "netstore": _netstore(folder, stack),
            "recorder": _recorder(folder, stack),
            "events": _events(folder, stack),
            "lease": _lease(folder, stack),
            "channel": _channel(stack),
        }


# -- actions ---------------------------------------------------------------------------------------


def _used(subject: Subject) -> str:
    try:
        subject.use(subject.made)
    except ckptd.CkptdError as error:
        return error.kind
    return "worked"


def _act(subject: Subject, action: str) -> str:
    if action == "use":
        return _used(subject)
    if action == "close":
        subject.close(subject.made)
    elif action == "leave" and hasattr(subject.made, "__exit__"):
        subject.made.__exit__(None, None, None)
    elif action == "gc":
        for name in list(vars(subject)):
            delattr(subject, name)
        gc.collect()
    return "done"


def _child(subject: Subject, action: str) -> tuple[str, int]:
    """Fork a child that acts; return what it said, and how it ended."""
    said, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        try:
            word = _act(subject, action)
        except BaseException as error:  # noqa: BLE001 - said
            word = repr(error)
        os.write(says, word.encode())
        if action == "exit":
            sys.exit(0)  # through all that the parent's program has to end
        os._exit(0)
    os.close(says)
    end = time.monotonic() + _WAIT_S
    status = None
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        time.sleep(0.005)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        status = None
    with open(said) as file:
        word = file.read()
    return word, -1 if status is None else os.waitstatus_to_exitcode(status)


def _in_pool(subject: Subject) -> tuple[str, int]:
    """Act in a pool, whose processes are ended by SIGTERM."""
    global _subject
    _subject = subject
    with mp.get_context("fork").Pool(2) as pool:
        word = pool.apply(_used_there)
        pool.apply_async(time.sleep, (600,))
    return word, 0


def _in_process(subject: Subject) -> tuple[str, int]:
    process = mp.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    process.terminate()
    process.join(_WAIT_S)
    return "done", 0 if process.exitcode == -signal.SIGTERM else process.exitcode or 1


def _in_loader(subject: Subject) -> tuple[str, int]:
    global _subject
    _subject = subject
    loader = torch.utils.data.DataLoader(
        range(4), num_workers=2, multiprocessing_context="fork", collate_fn=_collated
    )
    return min({word for batch in loader for word in batch}), 0


_subject: Subject | None = None


def _used_there() -> str:
    assert _subject is not None
    return _used(_subject)


def _collated(samples: list[int]) -> list[str]:
    return [_used_there() for _ in samples]


def _one(name: str, subject: Subject, action: str) -> dict[str, Any]:
    if action == "pool":
        word, code = _in_pool(subject)
    elif action == "process":
        word, code = _in_process(subject)
    elif action == "loader":
        word, code = _in_loader(subject)
    else:
        word, code = _child(subject, action)
    found = "fine"
    try:
        subject.check()
    except Exception as error:  # noqa: BLE001 - said
        found = repr(error)
    return {"object": name, "action": action, "child": word, "code": code, "parent": found}


def main(folder: Path, which: str = "") -> None:
    """Print what each child did, and what became of the parent's object."""
    with subjects(folder) as made:
        for name, subject in made.items():
            for action in ACTIONS if which == "all" or name == "checkpointer" else SOME:
                print(json.dumps(_one(name, subject, action)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
