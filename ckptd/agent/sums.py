"""Checksums and norms that the ranks of a node took, gathered from the files beside their rings."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Collection, Mapping

import numpy as np

from ckptd.agent.rings import Ring
from ckptd.errors import CkptdError, NotFoundError
from ckptd.monitor.report import SUM
from ckptd.monitor.ring.samples import SampleReader, samples_path
from ckptd.monitor.stats import Array

__all__ = ["Sums"]

_log = logging.getLogger("ckptd.agent")
_MOST = 1 << 16


class Sums:
    """Gathers samples; `add` now and then, `take` for a sheet."""

    def __init__(self) -> None:
        self._readers: dict[Ring, SampleReader | None] = {}
        self._rows: list[tuple[int, Array]] = []
        self._count = 0

    def close(self) -> None:
        """Close all files."""
        self.keep_only(())

    def keep_only(self, rings: Collection[Ring]) -> None:
        """Close the files of ranks that are gone."""
        here = set(rings)
        for ring in [ring for ring in self._readers if ring not in here]:
            reader = self._readers.pop(ring)
            if reader is not None:
                reader.close()

    def add(self, ring: Ring) -> None:
        """Take what a rank has written since; a file that cannot be read is told, and left."""
        reader = self._readers.get(ring)
        if reader is None and ring in self._readers:
            return  # it was told
        try:
            if reader is None:
                reader = self._opened(ring)
            new = reader.new()
        except NotFoundError:
            return  # it takes none, or none yet
        except CkptdError as error:
            _log.warning("samples of rank %d are not read: %s", ring.rank, error)
            if reader is not None:
                reader.close()
            self._readers[ring] = None
            return
        # What nobody fetches is dropped: a daemon that comes back wants to hear of now.
        if len(new) and self._count + len(new) <= _MOST:
            self._rows.append((ring.rank, new))
            self._count += len(new)

    def _opened(self, ring: Ring) -> SampleReader:
        path = samples_path(ring.path)
        try:
            info = os.stat(path, follow_symlinks=False)
        except OSError as error:
            raise NotFoundError("no samples here", kind="no-ring", where=str(path)) from error
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise NotFoundError("not our samples", kind="no-ring", where=str(path))
        reader = SampleReader(path)
        self._readers[ring] = reader
        return reader

    def take(self, rows: Mapping[int, int]) -> Array:
        """Return new rows of `SUM`; `rows` has the row in the sheet of each rank."""
        parts = []
        for rank, new in self._rows:
            if rank in rows:
                part = np.zeros(len(new), SUM)
                part["row"] = rows[rank]
                part["step"] = np.maximum(new["step"], -1)
                part["what"] = new["what"] - 1  # the sheet counts kinds from 0
                part["set"], part["value"] = new["set"], new["value"]
                parts.append(part)
        self._rows.clear()
        self._count = 0
        return np.concatenate(parts) if parts else np.zeros(0, SUM)
