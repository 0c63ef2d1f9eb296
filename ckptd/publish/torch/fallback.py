"""Fallback without a trainer: loads the newest checkpoint of a root; damaged ones passed over."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

from ckptd.base.torch.ranks import Agreement
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.root.opening import root_spec, trusting
from ckptd.checkpoint.torch.layouts import LayoutSpec
from ckptd.checkpoint.torch.loader import Loader, LoadReport, LoadSources
from ckptd.errors import CkptdError, CorruptError, NotFoundError, RefusedError
from ckptd.reshard.torch.layout.job import BoundStates

_log = logging.getLogger("ckptd")


class RootFallback:
    """Loads weights of a root into the tensors of a rollout. Every rank makes one; it only reads.

    Parameters
    ----------
    root
        Its URL or path.
    layout
        Of the rollout.
    saved_layout
        Of checkpoints that were saved without a layout; None: they have the names of the rollout.
    agreement
        Of the rollout's ranks.
    timeout_s
        Longest wait for other ranks, in seconds.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        layout: LayoutSpec,
        saved_layout: LayoutSpec | None,
        agreement: Agreement,
        timeout_s: float,
    ) -> None:
        self._agreement = agreement
        self._saved_layout = saved_layout
        self._catalogue = agreement.on_every_rank(
            lambda: Catalogue(trusting(root_spec(os.fspath(root))).open())
        )
        ranks = range(agreement.board.world)
        self._loader = Loader(
            self._catalogue, agreement, ranks, timeout_s, BoundStates(layout, agreement, ranks)
        )

    def load(
        self, state: Mapping[str, Any], names: Collection[str], above: int
    ) -> LoadReport | None:
        """Fill tensors from the newest checkpoint of a step above `above`.

        A checkpoint that is corrupt, or that is deleted meanwhile, is passed over.

        Parameters
        ----------
        state
            What has the tensors.
        names
            Of those that are filled: all of them, or none.
        above
            Steps up to this one are left alone.

        Returns
        -------
        LoadReport
            None: there is no such checkpoint; the tensors are as before.

        Raises
        ------
        MismatchError
            The checkpoint is of another model; nothing was written.
        CkptdError
            `state_corrupted`: the tensors are of no version. Else they are as before.
        """
        for step in self._steps(above):
            try:
                return self._loader.load(
                    state,
                    step,
                    strict=True,
                    only=names.__contains__,
                    rename=None,
                    weights_only=False,
                    device=None,
                    progress=None,
                    source_layout=self._saved_layout,
                )
            except (CorruptError, NotFoundError) as error:
                if error.state_corrupted:
                    raise
                _log.warning("skipping step %d of the root: %s", step, error.message)
        return None

    def _steps(self, above: int) -> list[int]:
        """Return the steps to try, newest first, the same on every rank."""
        try:
            found = LoadSources(self._catalogue, self._agreement, None).candidates(None)
        except NotFoundError:
            return []
        except CkptdError as error:
            if isinstance(error, RefusedError):
                raise
            _log.warning("the root cannot be read: %s", error.message)
            return []
        return [c.step for c in found if c.step > above]
