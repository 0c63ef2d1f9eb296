"""What a checkpointer does with what the controller promised."""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.save.handle import SaveTracker
from ckptd.elastic.messages import FromWorker, Out, Progress, Welcome
from ckptd.elastic.torch.session import elastichooks
from ckptd.elastic.torch.session.elastichooks import ElasticHooks, LauncherWatch
from ckptd.elastic.worker import WorkerLink
from ckptd.elastic.workerend import LauncherEnd
from ckptd.errors import CkptdError, ProcessError, RefusedError, StoreError
from ckptd.store import open_store


@pytest.fixture
def heard() -> queue.SimpleQueue[FromWorker | None]:
    """What the launcher was told."""
    return queue.SimpleQueue()


@pytest.fixture(autouse=True)
def link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: queue.SimpleQueue[FromWorker | None]
) -> Iterator[WorkerLink]:
    """A generation that is to go on from step 7."""
    launcher = LauncherEnd(tmp_path / "s", lambda worker, said: heard.put(said))
    monkeypatch.setenv("CKPTD_LAUNCHER", str(launcher.path))
    monkeypatch.setenv("CKPTD_GENERATION", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("CKPTD_STEP", "7")
    # A process asks once whether it has a launcher; this one had none, or that of another test.
    monkeypatch.setattr(WorkerLink, "_tried", 0)
    monkeypatch.setattr(WorkerLink, "_current", None)
    try:
        found = WorkerLink.current()
        assert found is not None
        yield found
        found.close()
    finally:
        launcher.close()


def claim(root: Path) -> None:
    """Make a root whose job saved something, of which nothing is left."""
    with open_store(str(root)) as store:
        catalogue = Catalogue(store)
        catalogue.create_or_open()
        catalogue.claim(None, 1, "start")


def test_nobody_begins_from_nothing_where_a_step_was_committed(tmp_path: Path) -> None:
    claim(tmp_path / "root")
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        with pytest.raises(RefusedError) as refused:
            ck.latest()
        assert (
            "was committed, but no snapshot or checkpoint of this job is found"
            in refused.value.message
        )
        assert "step 7" in refused.value.message
        assert refused.value.where == str(tmp_path / "root")


def test_a_root_at_which_nothing_was_ever_saved_has_lost_nothing(tmp_path: Path) -> None:
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        assert ck.latest() is None


def test_who_wants_a_new_run_begins_from_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "root")
    with ckptd.Checkpointer(str(tmp_path / "root"), new_run=True) as ck:
        assert ck.latest() is None


@pytest.mark.parametrize("error", [BufferError, ValueError, OSError])
def test_no_checkpointer_in_disorder_keeps_the_next_generation_from_beginning(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disorder:
        def abandon(self) -> None:
            raise error("cut short")

    one = Disorder()
    opened: weakref.WeakSet[Disorder] = weakref.WeakSet([one])
    monkeypatch.setattr(elastichooks, "_open", opened)
    elastichooks.abandon_all()
    assert not opened


def test_what_the_launcher_has_measured_is_known_once_it_said_so(link: WorkerLink) -> None:
    watch = LauncherWatch(())
    assert watch.failures == (0.0, 0.0)
    link.welcome = Welcome(1, 12.0, 7200.0)
    assert watch.failures == (7200.0, 12.0)


class Nothing:
    def abandon(self) -> None:
        """It has nothing to let go of."""


def steps_told(link: WorkerLink, heard: queue.SimpleQueue[FromWorker | None]) -> list[int]:
    """Return the steps that were told until now to be committed."""
    link.out(2)
    told = []
    while not isinstance(said := heard.get(timeout=60.0), Out):
        told += [said.step] if isinstance(said, Progress) else []
    return told


@pytest.mark.parametrize(
    ("error", "told"),
    [(StoreError("it has no room"), [8]), (ProcessError("this node's agent is gone"), [])],
)
def test_a_step_that_the_peer_has_not_counts_once_all_are_known_to_be_there(
    link: WorkerLink,
    heard: queue.SimpleQueue[FromWorker | None],
    error: CkptdError,
    told: list[int],
) -> None:
    # A copy to a peer fails first of all where that node has just been lost: the step was told,
    # and lost with it.
    owner = Nothing()
    hooks = ElasticHooks(owner, LocalBoard(), ())

    def save(step: int) -> SaveTracker:
        handle = SaveTracker(step, 1, "0001", 10, near=("memory", "peer"), root=False)
        hooks.saving(handle)
        handle.settle("memory")
        return handle

    first = save(8)
    save(9)  # on its way for long
    first.settle("peer", error)
    assert steps_told(link, heard) == []
    save(10)
    assert steps_told(link, heard) == []
    save(11).settle("peer")
    assert steps_told(link, heard) == [*told, 11]
