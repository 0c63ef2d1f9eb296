"""What a checkpointer does with what the controller promised."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckptd
from ckptd.elastic.worker import WorkerLink
from ckptd.elastic.workerend import LauncherEnd
from ckptd.engine.catalogue import Catalogue
from ckptd.errors import RefusedError
from ckptd.store import open_store
from ckptd.train import elastichooks


@pytest.fixture(autouse=True)
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerLink]:
    """A generation that is to go on from step 7."""
    launcher = LauncherEnd(tmp_path / "s", lambda worker, said: None)
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
        assert refused.value.kind == "lost-step"
        assert "step 7" in refused.value.message
        assert refused.value.where == str(tmp_path / "root")


def test_a_root_at_which_nothing_was_ever_saved_has_lost_nothing(tmp_path: Path) -> None:
    with ckptd.Checkpointer(str(tmp_path / "root")) as ck:
        assert ck.latest() is None


def test_who_wants_a_fresh_line_begins_from_nothing(tmp_path: Path) -> None:
    claim(tmp_path / "root")
    with ckptd.Checkpointer(str(tmp_path / "root"), fresh_line=True) as ck:
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
