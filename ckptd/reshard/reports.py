"""Reports on a reshard as plain data: rules, costs, proof, results of a process."""

from __future__ import annotations

from typing import Literal

import msgspec


class SourceProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the program that a source keeps with the one that it is read with.

    Attributes
    ----------
    kept
        ``none``: it keeps no program. ``same``: it is read with that. ``agrees``: both say the
        same of all that they say in the same logical tensors. ``unlike``: they have no logical
        tensor in common, so nothing was compared. ``differs``: they contradict each other, and the
        user insists. ``unreadable``: the kept program cannot be understood, or does not fit.
        ``unused``: a recipe cuts the stored tensors, whatever they are. ``hint``: it is foreign,
        and read with the layout that its files hint at; or, where that does not fit and a recipe
        needs none, with none, and `note` says why.
    hinted
        The kept program was made by a reader of foreign files, from their hints.
    compared, tensors
        How many stored tensors were compared, of how many that are read.
    sizes
        Sizes that the user gave in place of kept ones.
    known
        Sizes that it is read with and that a hint says, as shapes alone need not.
    note
        The first contradiction, or the fault of the kept program.
    """

    kept: Literal["none", "same", "agrees", "unlike", "differs", "unreadable", "unused", "hint"]
    hinted: bool = False
    compared: int = 0
    tensors: int = 0
    sizes: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    note: str = ""


class FolderNote(msgspec.Struct, frozen=True):
    """Note on values that a program which loads a folder lacks, or does not take.

    Attributes
    ----------
    text
        What it is, and what to do about it.
    names
        The tensors or objects, where it is about some.
    """

    text: str
    names: tuple[str, ...] = ()


class RuleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of one rule of the target.

    Attributes
    ----------
    rule
        As it is used.
    at
        File and line.
    tensors, bytes
        Number of target tensors by it, states included, and their bytes.
    sources
        Rules of the source that they come from.
    promise
        The worst of their values: ``exact``, ``exact up to fill``, ``choice`` or ``lossy``.
    """

    rule: str
    at: str
    tensors: int
    bytes: int
    sources: tuple[str, ...]
    promise: str


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a share.

    Attributes
    ----------
    files
        Data files that it writes.
    bytes_written
        Bytes of their data sections.
    bytes_needed, bytes_read
        Bytes of the source that the copies take, and those that are read for them (whole blocks).
    read_amplification
        `bytes_read` for each byte needed.
    peak_bytes
        Most memory for data: staging, reads under way, kept blocks.
    rounds, copies, source_files
        Rounds, strided copies, files of the source that are read.
    """

    files: int
    bytes_written: int
    bytes_needed: int
    bytes_read: int
    read_amplification: float
    peak_bytes: int
    rounds: int
    copies: int
    source_files: int


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the proof that every element of these files is written exactly once.

    Attributes
    ----------
    chunks, elements, copies
        Chunks of the share, their elements, and the strided copies that fill them.
    """

    chunks: int
    elements: int
    copies: int


class Resharded(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one process.

    Attributes
    ----------
    step, generation
        Those of the target.
    state
        ``committed``: the checkpoint exists, and this process made it exist. ``present``: it
        existed already. ``waiting``: files of other processes are missing.
    files, reused_files
        Data files of this process's share, and how many of them were complete already.
    missing_files
        Files of others that are missing, when `state` is ``waiting``.
    bytes_needed, bytes_read, bytes_written
        Of data sections, by this process: bytes that the copies take from the source, bytes that
        were read for them, bytes that were written.
    witness_values
        Values of the source's witness that were found at their places.
    peak_staged
        Most bytes staged at a time.
    rounds, seconds
        Rounds, and the time in all.
    """

    step: int
    generation: int
    state: str
    files: int
    reused_files: int = 0
    missing_files: int = 0
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    witness_values: int = 0
    peak_staged: int = 0
    rounds: int = 0
    seconds: float = 0.0
