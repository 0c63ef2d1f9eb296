"""Loading: what it holds while it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptd
from ckptd.errors import CkptdError
from ckptd.root.catalogue import Catalogue
from ckptd.root.leases import leases
from ckptd.runtime.ranks import LocalBoard
from ckptd.store.local import LocalStore
from ckptd.train.loader import Loader
from ckptd.train.ranks import Agreement


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
