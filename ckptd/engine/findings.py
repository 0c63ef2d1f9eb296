"""What verification found: plain data."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import msgspec

from ckptd.errors import CkptdError

__all__ = ["Finding", "Findings", "VerifyReport"]

MOST = 10_000
"""Findings kept; beyond it they are only counted."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong.

    Attributes
    ----------
    kind
        Stable code, as of errors: ``missing-file``, ``truncated``, ``bad-size``, ``digest``,
        ``bad-header``, ``bad-index``, ``witness``, ``lost`` (a chunk in a missing or truncated
        file), or the kind of the error that a record or the store gave.
    message
        One sentence.
    file, rank
        The file, relative to the root, and the rank that wrote it; "" and None where there is
        none.
    tensor, chunk
        The tensor and the chunk's name in its file; "" where the finding is about more.
    where
        Anything more exact: bytes, blocks.
    wanted, found
        The two sides of the check.
    """

    kind: str
    message: str
    file: str = ""
    rank: int | None = None
    tensor: str = ""
    chunk: str = ""
    where: str = ""
    wanted: str = ""
    found: str = ""

    @staticmethod
    def of(error: CkptdError, file: str = "", rank: int | None = None) -> Finding:
        """Return what an error says."""
        return Finding(
            kind=error.kind,
            message=error.message,
            file=file,
            rank=rank,
            where=error.where or "",
            wanted=error.wanted or "",
            found=error.found or "",
        )


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a verification.

    Attributes
    ----------
    step, generation
        The checkpoint.
    deep
        Data was read; otherwise sizes and headers only.
    files, tensors, chunks
        What the checkpoint holds; zero when not even its manifest can be read.
    data_bytes, read_bytes
        Bytes of its chunks, and bytes of data that were read and compared.
    absent
        Tensors that are incomplete on purpose.
    blind
        Tensors for which the witness can say nothing, since all its values are equal there.
    findings
        What is wrong, by file.
    more
        Further findings that were not kept.
    """

    step: int
    generation: int
    deep: bool
    files: int = 0
    tensors: int = 0
    chunks: int = 0
    data_bytes: int = 0
    read_bytes: int = 0
    absent: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    more: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


class Findings:
    """Collects findings from threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[Finding] = []
        self._seen: set[Finding] = set()
        self.more = 0

    def add(self, finding: Finding) -> None:
        """Note a finding; the same one twice is one."""
        with self._lock:
            if finding in self._seen:
                return
            if len(self._kept) >= MOST:
                self.more += 1
                return
            self._seen.add(finding)
            self._kept.append(finding)

    def extend(self, findings: Iterable[Finding]) -> None:
        """Note several."""
        for finding in findings:
            self.add(finding)

    def tensors(self) -> set[str]:
        """Names of the tensors that have findings."""
        with self._lock:
            return {f.tensor for f in self._kept if f.tensor}

    def all(self) -> tuple[Finding, ...]:
        """Return them: those of the whole first, then by file."""
        with self._lock:
            return tuple(sorted(self._kept, key=lambda f: f.file))
