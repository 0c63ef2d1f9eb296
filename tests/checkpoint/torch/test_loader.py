"""Loading: what it holds while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.leases import hold, leases
from ckptd.checkpoint.save.recover import LoadCandidate
from ckptd.checkpoint.torch import loader as loading
from ckptd.checkpoint.torch.loader import Loader, LoadSources
from ckptd.errors import CkptdError
from ckptd.store.local import LocalStore
from tests.processes import until

pytestmark = pytest.mark.usefixtures("writing_thread")


class Broken(LocalBoard):
    """The board of rank 0, gone at the moment when the lease is to be told."""

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("/lease"):
            raise CkptdError("the job's store is gone", kind="board-lost")
        super().set(key, value)


def test_no_lease_stays_when_the_others_cannot_be_told(tmp_path: Path) -> None:
    state = {"w": torch.arange(8.0)}
    with ckptd.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, state)
    catalogue = Catalogue(LocalStore(tmp_path))
    loader = Loader(catalogue, Agreement(Broken(0, 2), 5.0), [0, 1], 5.0)
    with pytest.raises(CkptdError, match="store is gone"):
        loader.load(
            state,
            None,
            strict=True,
            only=None,
            rename=None,
            weights_only=False,
            device=None,
            progress=None,
        )
    assert leases(catalogue) == {}


def test_a_load_is_held_for_as_long_as_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptd.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(8.0)})
    catalogue = Catalogue(LocalStore(tmp_path))
    sources = LoadSources(catalogue, Agreement(LocalBoard(0, 1), 5.0), None)
    [commit] = catalogue.commits()
    monkeypatch.setattr(
        loading, "hold_or_read", lambda index, name, holder: hold(index, name, seconds=0.2)
    )
    with sources.held(LoadCandidate(commit.step, commit.generation)):
        [first] = leases(catalogue).values()
        until(lambda: next(iter(leases(catalogue).values())).expires > first.expires + 0.1)
    assert leases(catalogue) == {}
