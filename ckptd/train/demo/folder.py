"""The demo's folder: what is in it, and making it ready without touching what is not ours."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckptd.errors import RefusedError

__all__ = ["Folder"]

_MARKER = "ckptd-demo.json"


class Folder:
    """Paths of one demo.

    Attributes
    ----------
    checkpoints
        The root that the job saves to.
    copies
        Roots that loaded states are written to again, one a life.
    resharded
        A checkpoint in another layout.
    runs
        Reports and logs of the runs, a folder each.
    plot, elastic_plot, report
        The pictures and the result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.checkpoints = self.path / "checkpoints"
        self.copies = self.path / "copies"
        self.resharded = self.path / "resharded"
        self.runs = self.path / "runs"
        self.plot = self.path / "loss.png"
        self.elastic_plot = self.path / "elastic.png"
        self.report = self.path / "report.json"
        self._marker = self.path / _MARKER

    def prepare(self) -> None:
        """Make the folder; what an earlier demo left in it is removed, and nothing else ever.

        Raises
        ------
        RefusedError
            The path is in use and not by an earlier demo.
        """
        if self.path.exists() and not self._is_free():
            if not self._marker.is_file():
                raise RefusedError(
                    "the folder is in use, and not by an earlier demo",
                    where=str(self.path),
                    hint="name another: ckptd demo --dir DIR",
                )
            for ours in (
                self.checkpoints,
                self.copies,
                self.resharded,
                self.runs,
                self.plot,
                self.elastic_plot,
                self.report,
            ):
                _remove(ours)
        self.path.mkdir(parents=True, exist_ok=True)
        self._marker.write_text('{"made_by": "ckptd demo"}\n')

    def remove_copies(self) -> None:
        """Remove what only the comparison needed."""
        _remove(self.copies)

    def _is_free(self) -> bool:
        return self.path.is_dir() and not any(self.path.iterdir())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
