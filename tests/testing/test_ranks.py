from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.errors import CkptdError, DeadlineError, MismatchError, UsageError
from ckptd.testing.ranks import rank_outcomes, run_ranks
from tests.processes import PATIENCE_S, lives, until, wait_for_stop

pytestmark = pytest.mark.dist


def sum_of_ranks(start: int) -> tuple[int, int, int]:
    import torch
    from torch import distributed

    total = torch.tensor([start + distributed.get_rank()])
    distributed.all_reduce(total)
    return distributed.get_rank(), distributed.get_world_size(), int(total.item())


def surroundings(name: str) -> tuple[str, str | None, str | None, int]:
    import torch

    return os.getcwd(), os.environ.get(name), os.environ["RANK"], torch.get_num_threads()


def one_raises(rank: int) -> None:
    from torch import distributed

    if distributed.get_rank() == rank:
        print("about to fail")
        raise MismatchError("shapes differ", where="weight", wanted=(2, 3), found=(3, 2))
    distributed.barrier()


def one_raises_something_local(rank: int) -> None:
    from torch import distributed

    class LocalError(Exception):
        pass

    if distributed.get_rank() == rank:
        raise LocalError("no pickle can carry me")


def unpicklable_result() -> object:
    return lambda: None


def one_hangs(rank: int) -> None:
    from torch import distributed

    if distributed.get_rank() == rank:
        a_place_to_hang()


def a_place_to_hang() -> None:
    time.sleep(3600)


def one_is_killed(rank: int) -> int:
    from torch import distributed

    if distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.barrier()
    return distributed.get_rank()


def one_is_killed_and_others_finish(rank: int, folder: str) -> int:
    from torch import distributed

    me = distributed.get_rank()
    Path(folder, str(me)).touch()
    if me == rank:
        # Ranks that still connect to one another would fail with it.
        until(lambda: len(os.listdir(folder)) == distributed.get_world_size())
        os.kill(os.getpid(), signal.SIGKILL)
    return me


def one_is_stopped_and_another_fails(folder: str) -> None:
    from torch import distributed

    distributed.barrier()
    pid = Path(folder, "pid")
    if distributed.get_rank() == 0:
        pid.write_text(f"{os.getpid()}")
        os.kill(os.getpid(), signal.SIGSTOP)
    until(lambda: pid.exists() and pid.read_text(), "the other rank stops itself")
    wait_for_stop(int(pid.read_text()))
    raise MismatchError("shapes differ", where="weight", wanted=(2, 3), found=(3, 2))


def starts_a_child_and_hangs(folder: str) -> None:
    child = subprocess.Popen(["sleep", "3600"])
    Path(folder, f"{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
    a_place_to_hang()


def leaves_a_thread() -> None:
    import threading

    threading.Thread(target=a_place_to_hang, name="left-behind").start()


def exits() -> None:
    sys.exit(7)


def test_results_come_in_rank_order() -> None:
    assert run_ranks(4, sum_of_ranks, 10) == [(rank, 4, 46) for rank in range(4)]


def test_a_world_of_one() -> None:
    assert run_ranks(1, sum_of_ranks, 5) == [(0, 1, 5)]


def test_worlds_follow_each_other() -> None:
    for nproc in (3, 2):
        assert run_ranks(nproc, sum_of_ranks, 0)[0][1] == nproc


def test_ranks_see_folder_and_environment_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FROM_TEST", "outer")
    assert run_ranks(2, surroundings, "FROM_TEST") == [
        (str(tmp_path), "outer", "0", 1),
        (str(tmp_path), "outer", "1", 1),
    ]
    (only,) = run_ranks(1, surroundings, "FROM_TEST", env={"FROM_TEST": "inner"})
    assert only[1] == "inner"


def test_a_rank_that_raises_is_the_error() -> None:
    with pytest.raises(MismatchError) as caught:
        run_ranks(3, one_raises, 1, grace_s=20)
    assert caught.value.where == "weight"
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 raised" in notes
    assert "in one_raises" in notes
    assert "about to fail" in notes


def test_an_error_that_pickle_cannot_carry_keeps_its_text() -> None:
    with pytest.raises(CkptdError, match="no pickle can carry me") as caught:
        run_ranks(2, one_raises_something_local, 0)
    assert "of a rank cannot be sent back" in caught.value.message
    assert "in one_raises_something_local" in "\n".join(caught.value.__notes__)


def test_a_result_that_pickle_cannot_carry() -> None:
    with pytest.raises(CkptdError) as caught:
        run_ranks(1, unpicklable_result)
    assert "of a rank cannot be sent back" in caught.value.message


def test_a_rank_that_hangs_shows_where() -> None:
    error = past_deadline(lambda e: e.where == "rank 2", 3, one_hangs, 2)
    assert "ranks were still running" in error.message
    assert error.where == "rank 2"
    assert "a_place_to_hang" in "\n".join(error.__notes__)


def test_a_thread_that_keeps_the_process_alive_shows_in_the_stacks() -> None:
    error = past_deadline(_shows_where, 1, leaves_a_thread)
    assert _shows_where(error)


def test_a_rank_that_does_not_react_to_signals_is_killed_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        run_ranks(2, one_is_stopped_and_another_fails, str(tmp_path), deadline_s=200, grace_s=0.5)
    assert "rank 0 was still running and was killed" in "\n".join(caught.value.__notes__)
    assert "did not react" in "\n".join(caught.value.__notes__)
    assert not lives(int((tmp_path / "pid").read_text()))


def test_a_killed_rank_is_the_cause_and_the_others_are_told_by_gloo() -> None:
    with pytest.raises(CkptdError, match="killed by SIGKILL") as caught:
        run_ranks(3, one_is_killed, 1, grace_s=20)
    assert caught.value.kind == "rank-died"
    assert "rank 1 of 3" in caught.value.message


@pytest.mark.parametrize("rank", [0, 2])
def test_outcomes_tell_how_each_rank_ended(rank: int, tmp_path: Path) -> None:
    outcomes = rank_outcomes(
        3, one_is_killed_and_others_finish, rank, str(tmp_path), grace_s=PATIENCE_S
    )
    assert [o.rank for o in outcomes] == [0, 1, 2]
    for outcome in outcomes:
        if outcome.rank == rank:
            assert (outcome.ok, outcome.exit_code) == (False, -signal.SIGKILL)
            assert outcome.error is None
            assert not outcome.ended_by_harness
        else:
            assert (outcome.ok, outcome.exit_code, outcome.value) == (True, 0, outcome.rank)


def test_sys_exit_is_not_a_return() -> None:
    (outcome,) = rank_outcomes(1, exits)
    assert isinstance(outcome.error, SystemExit)
    assert not outcome.ok


def test_nothing_survives_the_call(tmp_path: Path) -> None:
    def pids() -> list[int]:
        return [int(pid) for f in tmp_path.iterdir() for pid in f.read_text().split()]

    past_deadline(lambda _: len(pids()) == 4, 2, starts_a_child_and_hangs, str(tmp_path))
    assert len(pids()) == 4
    assert_all_end(pids())


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    (pids := tmp_path / "pids").mkdir()
    script = textwrap.dedent(
        f"""
        from ckptd.testing.ranks import run_ranks
        from tests.testing.test_ranks import starts_a_child_and_hangs
        if __name__ == "__main__":
            run_ranks(2, starts_a_child_and_hangs, {str(pids)!r}, deadline_s=100)
        """
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its folder outlives it
    harness = subprocess.Popen([sys.executable, "-c", script], cwd=root, env=environment)
    try:
        until(lambda: sum(bool(f.read_text()) for f in pids.iterdir()) == 2)
    finally:
        harness.kill()
        harness.wait(PATIENCE_S)
    assert_all_end([int(pid) for f in pids.iterdir() for pid in f.read_text().split()])


def test_what_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        run_ranks(1, lambda: None)
    with pytest.raises(UsageError, match="must be at least 1"):
        run_ranks(0, exits)


def _shows_where(error: DeadlineError) -> bool:
    return "a_place_to_hang" in "\n".join(error.__notes__)


def past_deadline(
    reached: Callable[[DeadlineError], bool],
    nproc: int,
    function: Callable[..., object],
    *args: object,
) -> DeadlineError:
    """Run ranks until their deadline, a later one as long as they had not `reached` their place.

    The start counts, and on a busy machine no number of seconds is enough for it.
    """
    for deadline_s in (2, 10, 50):
        with pytest.raises((DeadlineError, RuntimeError)) as caught:  # gloo's, of a peer's death
            run_ranks(nproc, function, *args, deadline_s=deadline_s)
        if isinstance(caught.value, DeadlineError) and reached(caught.value):
            break
    assert isinstance(caught.value, DeadlineError)
    return caught.value


def assert_all_end(pids: list[int]) -> None:
    until(lambda: not any(map(lives, pids)))
