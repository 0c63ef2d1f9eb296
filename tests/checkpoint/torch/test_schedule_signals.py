"""Signals that ask for a save: real ones, to this process and to one rank of several."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptd
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.torch.schedule import SAVE, STOP, SignalWatch
from ckptd.errors import DeadlineError, UsageError
from ckptd.store import open_store
from ckptd.testing.ranks import run_ranks
from tests import programs
from tests.processes import stop
from tests.writing import VARIABLE

IN_THREAD = {VARIABLE: "thread"}
"""Of ranks whose writing process is not what a test is about."""
TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture(autouse=True)
def _same_handlers_after() -> Iterator[None]:
    numbers = (TERM, USR1, USR2, signal.SIGINT)
    before = [signal.getsignal(n) for n in numbers]
    yield
    after = [signal.getsignal(n) for n in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def me(number: int) -> None:
    os.kill(os.getpid(), number)


# -- the watch -------------------------------------------------------------------------------------


def test_a_signal_is_pending_until_it_is_served() -> None:
    watch = SignalWatch((TERM, USR1))
    assert not watch.pending(SAVE)
    me(USR1)
    me(TERM)
    assert (watch.pending(SAVE), watch.pending(STOP)) == (USR1, TERM)
    watch.serve(SAVE)
    assert (watch.pending(SAVE), watch.pending(STOP)) == (0, TERM)
    me(USR1)
    watch.serve(STOP)
    assert not watch.pending(SAVE)
    assert not watch.pending(STOP)
    watch.close()


def test_the_time_to_stop_counts_from_the_first_signal_that_ends() -> None:
    watch = SignalWatch((TERM, USR1))
    me(USR1)
    assert watch.stop_at is None
    me(TERM)
    first = watch.stop_at
    me(TERM)
    assert watch.stop_at == first
    assert first is not None
    watch.close()


def test_the_handler_that_was_there_is_called_and_put_back() -> None:
    got: list[int] = []

    def old(number: int, frame: Any) -> None:
        got.append(number)

    before = signal.signal(USR1, old)
    watch = SignalWatch(USR1)
    me(USR1)
    assert (got, watch.pending(SAVE)) == ([USR1], USR1)
    watch.close()
    assert signal.getsignal(USR1) == old
    signal.signal(USR1, before)


def test_two_watches_may_close_in_any_order() -> None:
    first, second = SignalWatch(USR1), SignalWatch(USR1)
    me(USR1)
    assert first.pending(SAVE)
    assert second.pending(SAVE)
    first.close()  # the second's handler stays, and the first's below it is inert
    second.serve(SAVE)
    before = signal.getsignal(USR1)
    watch = SignalWatch(USR2)
    assert signal.getsignal(USR1) == before
    watch.close()
    second.close()
    assert signal.getsignal(USR1) == first._handle
    signal.signal(USR1, signal.SIG_DFL)


def test_the_first_interrupt_asks_and_the_second_interrupts() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    watch = SignalWatch(signal.SIGINT)
    me(signal.SIGINT)
    assert watch.pending(STOP)
    with pytest.raises(KeyboardInterrupt):
        me(signal.SIGINT)
    watch.close()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "bad", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, 0, 999, True, "SIGTERM", None]
)
def test_what_cannot_be_answered_is_refused(bad: Any) -> None:
    with pytest.raises(UsageError) as info:
        SignalWatch((USR1, bad))
    assert "preemption needs signals that a program can handle" in info.value.message


def test_only_the_main_thread_can_watch() -> None:
    errors: list[BaseException] = []

    def make() -> None:
        SignalWatch(())
        try:
            SignalWatch(TERM)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert [e.message for e in errors if isinstance(e, UsageError)] == [
        "only the main thread can handle signals"
    ]


def test_after_close_a_signal_does_what_it_did_before() -> None:
    # In a thread the handler cannot be put back: it must not swallow what ends the process.
    code = """
import os, signal, threading
from ckptd.checkpoint.torch.schedule import SignalWatch
watch = SignalWatch(signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
thread = threading.Thread(target=watch.close)
thread.start(); thread.join()
print("alive", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("still alive")
"""
    done = programs.run("-c", code)
    assert (done.stdout, done.returncode) == ("alive\n", -TERM), done.stderr


# -- one rank --------------------------------------------------------------------------------------


def state(size: int = 8) -> dict[str, Any]:
    return {"x": torch.arange(size, dtype=torch.float32)}


def test_a_user_signal_saves_once_and_training_goes_on(tmp_path: Path) -> None:
    saved = []
    with ckptd.Checkpointer(
        str(tmp_path), every=100, preemption=ckptd.Preemption(signals=(TERM, USR1))
    ) as ck:
        for step in range(1, 11):
            if step == 4:
                me(USR1)
            saved += [step] * bool(ck.save(step, state()))
        assert not ck.stop_requested
    assert saved == [4]


def test_a_signal_that_ends_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    with ckptd.Checkpointer(
        str(tmp_path), every=100, preemption=ckptd.Preemption(signals=(TERM, USR1))
    ) as ck:
        for step in range(1, 11):
            if step == 4:
                me(TERM)
                assert not ck.stop_requested
            ck.save(step, state())
            if ck.stop_requested:
                break
    assert step == 4
    assert signal.getsignal(TERM) == before
    with open_store(str(tmp_path)) as store:
        assert [c.step for c in Catalogue(store).line()] == [4]


def test_a_scheduler_that_signals_every_process_does_not_end_the_writing_one(
    tmp_path: Path,
) -> None:
    with ckptd.Checkpointer(
        str(tmp_path),
        storage=ckptd.Storage(throttle=2e6),
        preemption=ckptd.Preemption(signals=TERM),
    ) as ck:
        worker = ck.writer_pid
        assert worker is not None
        under_way = ck.save(1, state(1 << 18))
        os.kill(worker, TERM)
        me(TERM)
        last = ck.save(2, state(1 << 18))
        assert ck.stop_requested
        assert under_way is not None
        assert last is not None
        last.durable()
        under_way.durable()
        assert ck.writer_pid == worker


def test_without_save_on_no_handler_is_touched(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    with ckptd.Checkpointer(str(tmp_path)) as ck:
        assert signal.getsignal(TERM) == before
        assert not ck.stop_requested


def test_what_a_signal_asks_for_is_never_skipped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"copy": ckptd.CopyOptions(slots=1, when_full="skip")}
    with ckptd.Checkpointer(
        str(tmp_path), every=1, preemption=ckptd.Preemption(signals=USR1), **options
    ) as ck:
        worker = ck.writer_pid
        assert worker is not None
        stop(worker)
        assert ck.save(1, state())
        assert not ck.save(2, state())
        me(USR1)
        threading.Timer(0.1, os.kill, (worker, signal.SIGCONT)).start()
        assert ck.save(3, state())
        assert ck.skipped == 1


@pytest.mark.parametrize(
    "arguments", [{"preemption": ckptd.Preemption(signals=(9,))}, {"every": "often"}]
)
def test_bad_options(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as info:
        ckptd.Checkpointer(str(tmp_path), **arguments)
    assert info.value.message in (
        "invalid every=",
        "preemption needs signals that a program can handle",
    )


@pytest.mark.parametrize("when", ["before", "in close"])
def test_close_gives_up_with_the_scheduler_and_says_what_is_lost(tmp_path: Path, when: str) -> None:
    ck = ckptd.Checkpointer(
        str(tmp_path),
        every=5,
        storage=ckptd.Storage(throttle=200e3),
        preemption=ckptd.Preemption(signals=TERM, grace_s=0.5),
        timeout_s=60.0,
    )
    first = ck.save(5, state())
    assert first is not None
    first.durable()
    worker = ck.writer_pid
    assert worker is not None
    late = threading.Timer(0.3, me, [TERM])
    if when == "before":
        me(TERM)
        assert ck.save(6, state(4 << 20))
        assert ck.stop_requested
    else:
        assert ck.save(10, state(4 << 20))
        late.start()
    with pytest.raises(DeadlineError) as info:
        ck.close()
    assert info.value.kind == "grace"
    assert "step 5 is the newest that is" in info.value.message
    assert "bytes written" in str(info.value.found)
    os.kill(worker, 0)  # it may finish, if it is left alone
    client = ck._client
    assert client is not None
    os.kill(worker, signal.SIGKILL)
    client.close(10.0)


# -- several ranks ---------------------------------------------------------------------------------


def loop(
    root: str, who: int, number: int, pause_s: float, every: Any, until: int = 0
) -> dict[str, Any]:
    """Train 60 steps, or however many it takes until there are so many saves."""
    saved, stopped = [], None
    handlers = [signal.getsignal(n) for n in (TERM, USR1)]
    with ckptd.Checkpointer(
        root, every=every, preemption=ckptd.Preemption(signals=(TERM, USR1))
    ) as ck:
        for step in range(1, 3000 if until else 61):
            dist.barrier()  # as training does
            time.sleep(pause_s)
            if step == 7 and dist.get_rank() == who:
                me(number)
            if ck.save(step, state()):
                saved.append(step)
            if ck.stop_requested:
                stopped = step
                break
            if until and len(saved) == until:
                break
    restored = handlers == [signal.getsignal(n) for n in (TERM, USR1)]
    return {"saved": saved, "stopped": stopped, "restored": restored}


@pytest.mark.dist
@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("number", [TERM, USR1])
def test_a_signal_to_one_rank_is_everybodys(tmp_path: Path, who: int, number: int) -> None:
    ranks = run_ranks(
        3, loop, str(tmp_path), who, int(number), 0.02, 1000, deadline_s=200.0, env=IN_THREAD
    )
    assert all(r == ranks[0] for r in ranks)
    assert ranks[0]["restored"]
    (step,) = ranks[0]["saved"]
    assert step >= 7
    assert ranks[0]["stopped"] == (step if number == TERM else None)
    with open_store(str(tmp_path)) as store:
        assert [c.step for c in Catalogue(store).line()] == [step]


def three_signals(root: str) -> list[int]:
    """Two ranks get one to save, and later one of them one to stop."""
    saved = []
    rank = dist.get_rank()
    with ckptd.Checkpointer(
        root, every=1000, preemption=ckptd.Preemption(signals=(TERM, USR1))
    ) as ck:
        for step in range(1, 200):
            dist.barrier()
            time.sleep(0.01)
            if step == 7 and rank > 0:
                me(USR1)
            if len(saved) == 1 and step > saved[0] + 5 and rank == 1:
                me(TERM)
            if ck.save(step, state()):
                saved.append(step)
            if ck.stop_requested:
                break
    return saved


@pytest.mark.dist
def test_the_same_signal_on_two_ranks_is_one_save(tmp_path: Path) -> None:
    ranks = run_ranks(3, three_signals, str(tmp_path), deadline_s=200.0, env=IN_THREAD)
    assert all(r == ranks[0] for r in ranks)
    assert len(ranks[0]) == 2


@pytest.mark.dist
def test_auto_saves_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    auto = ckptd.Auto(mtbf_hours=1e-4)
    ranks = run_ranks(3, loop, str(tmp_path), -1, 0, 0.02, auto, 3, deadline_s=200.0, env=IN_THREAD)
    assert all(r == ranks[0] for r in ranks)
    assert ranks[0]["saved"][0] == 1
    assert len(ranks[0]["saved"]) == 3


# -- children --------------------------------------------------------------------------------------

CHILDREN = """
import multiprocessing as mp, os, signal, sys, time
from ckptd.checkpoint.torch.schedule import SignalWatch

what, mine = sys.argv[1:]
if mine == "handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
first, second = SignalWatch(signal.SIGTERM), SignalWatch((signal.SIGTERM, signal.SIGUSR1))
mp.set_start_method("fork")
wanted = 7 if mine == "handler" else -signal.SIGTERM
if what == "pool":
    with mp.Pool(1) as pool:
        pool.apply_async(time.sleep, (600,))
elif what == "daemon":
    mp.Process(target=time.sleep, args=(600,), daemon=True).start()
elif what == "terminate":  # before and after it has begun
    for pause in (0.0, 0.5):
        process = mp.Process(target=time.sleep, args=(600,))
        process.start()
        time.sleep(pause)
        process.terminate()
        process.join()
        assert process.exitcode == wanted, process.exitcode
elif what == "fork":
    for number, code in ((signal.SIGTERM, wanted), (signal.SIGUSR1, -signal.SIGUSR1)):
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), number)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
os.kill(os.getpid(), signal.SIGUSR1)
assert second.pending("save") and not first.pending("save")
print("end")
"""


@pytest.mark.parametrize("what", ["pool", "daemon", "terminate", "fork"])
@pytest.mark.parametrize("mine", ["handler", "default"])
def test_forked_children_end_as_they_would_without_it(what: str, mine: str) -> None:
    done = programs.run("-c", CHILDREN, what, mine)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


GROUP = """
import signal, sys, time, torch, ckptd
from torch.utils.data import DataLoader

root, start, workers, persistent, wrapped = sys.argv[1:]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, at):
        return torch.full((4,), float(at))


def main():
    more = {"multiprocessing_context": start, "persistent_workers": persistent == "True"}
    loader = DataLoader(Rows(), num_workers=int(workers), **more if int(workers) else {})
    data = ckptd.Batches(loader)
    model = torch.nn.Linear(4, 4)
    optim = torch.optim.AdamW(model.parameters())
    with ckptd.Checkpointer(root, every=100000, preemption=True) as ck:
        plain = iter(loader) if wrapped == "False" else None
        for step in range(1, 4000):
            batch = next(data) if wrapped == "True" else next(plain)
            model(batch).sum().backward()
            optim.step()
            time.sleep(0.01)
            ck.save(step, {"model": model, "optim": optim, "data": data}, force=step == 1)
            if step == 5:
                print("READY", flush=True)
            if ck.stop_requested:
                # More come than were under way: the workers live.
                for _ in range(20):
                    next(data) if wrapped == "True" else next(plain)
                print("STOP", step, flush=True)
                break


if __name__ == "__main__":
    main()
"""


def group_signal(tmp_path: Path, *arguments: str) -> tuple[int, str, list[int]]:
    """Send TERM to all processes of a job; return its code, its output and the steps it saved."""
    (tmp_path / "job.py").write_text(GROUP)
    root = tmp_path / "root"
    job = programs.Program(tmp_path / "job.py", root, *arguments, together=True)
    said = ""
    for line in job.stdout:
        said += line
        if "READY" in line:
            os.killpg(job.pid, signal.SIGTERM)
            break
    rest, _ = job.communicate()
    with open_store(str(root)) as store:
        steps = [c.step for c in Catalogue(store).commits()]
    return job.wait(), said + rest, steps


CASES = [
    ("fork", "0", "False", "True"),
    ("fork", "2", "False", "True"),
    ("spawn", "2", "True", "True"),
    ("fork", "2", "True", "False"),
    ("spawn", "2", "False", "False"),
    ("forkserver", "2", "False", "True"),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.long] if n not in (1, 2) else [])
        for n, c in enumerate(CASES)
    ],
)
def test_a_signal_to_all_processes_saves(tmp_path: Path, case: tuple[str, ...]) -> None:
    code, said, steps = group_signal(tmp_path, *case)
    assert code == 0, said
    assert f"STOP {max(steps)}" in said, (steps, said)
    assert max(steps) > 1
