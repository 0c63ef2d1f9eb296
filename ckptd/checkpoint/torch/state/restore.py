"""Load into a state: names matched, ``only``, missing and unexpected ones, mismatches; applied.

In it: how many names an error lists; names that are near.

The order of a load: `prepare` the leaves, compare them with the checkpoint, fill
``leaf.tensor`` of each tensor, `apply_objects`. Until then the state is unchanged but for the
tensors that were filled: made tensors are not attached yet, meta tensors still are meta.
"""

from __future__ import annotations

import difflib
import fnmatch
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from ckptd.base.torch.ranks import Agreement
from ckptd.base.torch.tensors import DTYPE_NAMES
from ckptd.checkpoint.format.manifest import SUBCLASS, Manifest, about_foreign, foreign_unread
from ckptd.checkpoint.format.words import unread_tensors
from ckptd.checkpoint.torch.state.flatten import KnownState, collect
from ckptd.checkpoint.torch.state.leaves import (
    Dropped,
    Leaves,
    Reseed,
    SavedNames,
    Sink,
    TensorLeaf,
)
from ckptd.checkpoint.torch.state.modules import check_buffers, materialise, reshard
from ckptd.checkpoint.torch.state.optimizers import ParameterOwners
from ckptd.checkpoint.torch.state.walk import walk
from ckptd.checkpoint.torch.state.words import is_note
from ckptd.errors import CkptdError, MismatchError, first_few

_log = logging.getLogger("ckptd")

MAX_LISTED = 40


class SavedState(msgspec.Struct, frozen=True, dict=True):
    """A manifest, by name.

    Attributes
    ----------
    tensors
        Number of each tensor that is part of the state (encoded objects are not).
    objects
        Number of each replicated object.
    per_rank
        Number of each per-rank object.
    aliases
        Tensor name by alias.
    """

    manifest: Manifest
    tensors: dict[str, int]
    objects: dict[str, int]
    per_rank: dict[str, int]
    aliases: dict[str, str]

    @staticmethod
    def of(manifest: Manifest) -> SavedState:
        """Index a manifest."""
        encoded = {o.tensor for o in manifest.objects if o.tensor}
        tensors = {t.name: i for i, t in enumerate(manifest.tensors) if t.name not in encoded}
        aliases = {a: t.name for t in manifest.tensors for a in t.aliases}
        objects = {o.name: i for i, o in enumerate(manifest.objects) if not o.per_rank}
        per_rank = {o.name: i for i, o in enumerate(manifest.objects) if o.per_rank}
        return SavedState(manifest, tensors, objects, per_rank, aliases)

    def doubtful(self) -> list[str]:
        """Return the names that mean several things: a tensor and a value, or a rank's own."""
        kinds = ({*self.tensors, *self.aliases}, self.objects.keys(), self.per_rank.keys())
        if len(self.names()) == sum(map(len, kinds)):
            return []
        return sorted(name for name, n in Counter(chain(*kinds)).items() if n > 1)

    def names(self) -> set[str]:
        """Return every name."""
        return {*self.tensors, *self.objects, *self.per_rank, *self.aliases}


class Matching(msgspec.Struct, dict=True):
    """The names that a load will fill: live name to number in the manifest's table.

    Attributes
    ----------
    copies
        By further live name of a tensor that is filled: its name, and the number of what the
        checkpoint has under the further one.
    overlaps
        Leaves that have some memory in common, in groups.
    missing
        Live names that the checkpoint has not.
    unexpected
        Names in the checkpoint that this rank's state has no place for: another rank's may have.
    differences
        Differences that no option allows, a line each.
    required
        Tells which names must be in the checkpoint.
    adopted
        Live name, by the checkpoint's name, of what only the code of a module may know. It is
        among `unexpected` until `keep_adopted`.
    """

    tensors: dict[str, int] = msgspec.field(default_factory=dict)
    objects: dict[str, int] = msgspec.field(default_factory=dict)
    per_rank: dict[str, int] = msgspec.field(default_factory=dict)
    copies: dict[str, tuple[str, int]] = msgspec.field(default_factory=dict)
    overlaps: list[list[TensorLeaf]] = msgspec.field(default_factory=list)
    missing: list[str] = msgspec.field(default_factory=list)
    unexpected: list[str] = msgspec.field(default_factory=list)
    differences: list[str] = msgspec.field(default_factory=list)
    required: Callable[[str], bool] = bool
    adopted: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether each leaf is filled with one tensor, and nothing is missing or to be compared."""
        found = (self.copies, self.overlaps, self.missing, self.differences, self.adopted)
        return not any(found)

    def keep_adopted(self, unexpected: Collection[str]) -> list[str]:
        """Leave out what was adopted and other ranks have a place for; return what is kept.

        Parameters
        ----------
        unexpected
            Names that no rank has a place for.
        """
        for source, name in self.adopted.items():
            if source not in unexpected:
                self.tensors.pop(name, None)
                self.objects.pop(name, None)
        self.unexpected = [n for n in unexpected if n not in self.adopted]
        return [name for name in self.adopted.values() if name in self.tensors]


def every(name: str) -> bool:
    """Tell of each name that it is wanted."""
    return True


def unchanged(name: str) -> str:
    """Return a name as it is."""
    return name


def chosen(names: Iterable[str], wanted: Callable[[str], bool]) -> set[str]:
    """Return the names that are wanted; asks nothing where all are."""
    return {*names} if wanted is every else {n for n in names if wanted(n)}


def mapped(names: Iterable[str], rename: Callable[[str], str]) -> dict[str, str]:
    """Return what each of some names is called elsewhere; asks nothing where all are the same."""
    names = list(names)
    return dict(zip(names, names if rename is unchanged else map(rename, names), strict=True))


def selector(only: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    """Turn the `only` argument into a test on names."""
    if only is None:
        return every
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else list(only)
    return lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns)


def saved_names(
    saved: SavedState, live: Callable[[str], str], wanted: Callable[[str], bool]
) -> SavedNames:
    """Return the manifest's contents in live names, as `prepare` takes them."""
    table, objects = saved.manifest.tensors, saved.manifest.objects
    names = mapped((*saved.tensors, *saved.objects, *saved.aliases), live)
    some = chosen(names.values(), wanted)
    return SavedNames(
        tensors={
            names[n]: (table[i].dtype, table[i].shape)
            for n, i in saved.tensors.items()
            if names[n] in some
        },
        objects={
            names[n]: objects[i].kind
            for n, i in saved.objects.items()
            if names[n] in some or is_note(names[n])
        },
        aliases={names[a]: names[n] for a, n in saved.aliases.items() if names[a] in some},
        groups={
            names[n]: objects[i].value
            for n, i in saved.objects.items()
            if objects[i].kind == "groups"
        },
        foreign=bool(about_foreign(saved.manifest)),
        wrapped=_wrapped(saved, live, wanted),
    )


def _wrapped(
    saved: SavedState, live: Callable[[str], str], wanted: Callable[[str], bool]
) -> dict[str, Any]:
    """Return what says of wrapped tensors what they are, where a part of them is wanted."""
    objects = saved.manifest.objects
    records = {n: objects[i].value for n, i in saved.objects.items() if objects[i].kind == SUBCLASS}
    found: dict[str, Any] = {}
    for name in (*saved.tensors, *saved.aliases) if records else ():
        if not wanted(live(name)):
            continue
        above = name.rpartition(".")[0]
        while above:
            if above in records:
                found[live(above)] = records[above]
            above = above.rpartition(".")[0]
    return found


def match(
    leaves: Leaves,
    saved: SavedState,
    wanted: Callable[[str], bool],
    to_saved: Callable[[str], str],
    *,
    strict: bool,
) -> Matching:
    """Pair live leaves with saved entries.

    A tensor with several live names may be several tensors in the checkpoint: it is filled with
    one of them, and the others are copies that must be equal. `refuse_misfit` raises what does not
    fit, when it is known what other ranks have a place for.

    Raises
    ------
    RefusedError
        kind ``unreadable-format``: the foreign checkpoint has tensors of kinds that are not read.
    """
    unread = foreign_unread(saved.manifest)
    if unread:
        asked = {to_saved(n) for n in (*leaves.tensors, *leaves.aliases) if wanted(n)}
        asked |= {n for n in unread if strict and wanted(n)}
        if kinds := {n: kind for n, kind in unread.items() if n in asked}:
            raise unread_tensors(kinds, f"step {saved.manifest.step}")
    found = Matching(required=lambda name: strict and wanted(name))
    differences = found.differences
    used: set[str] = set()
    names = mapped((*leaves.tensors, *leaves.aliases, *leaves.objects, *leaves.per_rank), to_saved)
    some = chosen((*leaves.tensors, *leaves.aliases), wanted)
    here = [name for name in leaves.tensors if name in some]
    for name, (tensor, aliases) in zip(here, leaves.forms(here), strict=True):
        sources: dict[int, str] = {}
        for one in (name, *aliases):
            source = names[one]
            source = saved.aliases.get(source, source)
            # An unwanted alias may give the tensor its value, and is no copy.
            if source in saved.tensors and (one in some or not sources):
                sources.setdefault(saved.tensors[source], one)
        if not sources:
            # Where a module's own code sees what is there, it finds what is missing as well.
            if not (strict and leaves.converts(name)):
                found.missing.append(name)
            continue
        for number, one in sources.items():
            entry = saved.manifest.tensors[number]
            used.add(entry.name)
            if entry.dtype != DTYPE_NAMES.get(tensor.dtype) or entry.shape != tensor.shape:
                leaf = leaves.tensors[name]
                differences.append(
                    f"{one}: wanted {leaf.dtype}{list(leaf.shape)}, "
                    f"found {entry.dtype}{list(entry.shape)}"
                )
            elif name in found.tensors:
                found.copies[one] = name, number
            else:
                found.tensors[name] = number
    _match_objects(found, leaves, saved, wanted, to_saved, used, strict=strict)
    everything = [*saved.tensors, *saved.objects, *saved.per_rank]
    known = used.union(names.values())
    # A checkpoint with two things under one name does not say which of them is meant.
    doubtful = [n for n in saved.doubtful() if wanted(n)]
    found.unexpected = [n for n in everything if n not in known and wanted(n)]
    found.unexpected += [n for n in doubtful if n in known]
    adopted = {name for path in leaves.paths for name in path.adopted}
    found.adopted = {to_saved(n): n for n in adopted if n in found.tensors or n in found.objects}
    found.unexpected += found.adopted
    misfits = {n: why for n, why in leaves.misfits.items() if wanted(f"{n}.groups")}
    if strict:
        differences += [f"{n}: {why}" for n, why in misfits.items()]
        # One line says of all of them why they have no place here.
        below = tuple(f"{n}." for n in misfits)
        found.unexpected = [n for n in found.unexpected if not n.startswith(below)]
        differences += [f"{n}: both a tensor and a value in the checkpoint" for n in doubtful]
        return found
    for name, why in misfits.items():
        _log.warning("%s keeps its live state: %s", name, why)
        found.missing.append(f"{name}.groups")
    return found


def refuse_misfit(
    found: Matching, saved: SavedState, leaves: Leaves, *, strict: bool, hint: str = ""
) -> None:
    """Raise what `match` found and no load can do.

    Parameters
    ----------
    found
        Its `unexpected` are names that no rank has a place for.
    hint
        A further way out.

    Raises
    ------
    MismatchError
        kind ``mismatch``: lists every missing and unexpected name (unless `strict` is False) and
        every difference of shape or dtype, with the nearest names.
    """
    if found.differences or (strict and (found.missing or found.unexpected)):
        raise _error(found, saved, leaves, strict, hint)


def _match_objects(
    found: Matching,
    leaves: Leaves,
    saved: SavedState,
    wanted: Callable[[str], bool],
    to_saved: Callable[[str], str],
    used: set[str],
    *,
    strict: bool,
) -> None:
    tables = (
        (leaves.objects, saved.objects, found.objects),
        (leaves.per_rank, saved.per_rank, found.per_rank),
    )
    for live, there, out in tables:
        for name in live:
            if not wanted(name):
                continue
            source = to_saved(name)
            if source in there:
                out[name] = there[source]
                used.add(source)
            elif not (strict and leaves.converts(name)):
                found.missing.append(name)
    # A module that is given a part of its state must know of which version that part is.
    filled = {*found.tensors, *found.objects}
    for path in leaves.paths:
        if any(map(path.holds, filled)):
            notes = {n: saved.objects.get(to_saved(n)) for n in path.notes}
            found.objects |= {n: number for n, number in notes.items() if number is not None}
            used.update(map(to_saved, notes))


def _error(
    found: Matching, saved: SavedState, leaves: Leaves, strict: bool, hint: str
) -> MismatchError:
    lines = list(found.differences)
    if strict:
        lines += [_missing(n, leaves, saved) for n in found.missing]
        live = {*leaves.tensors, *leaves.objects, *leaves.per_rank}
        lines += [f"{n}: not in the live state{_near(n, live)}" for n in found.unexpected]
    shown = "\n    ".join(lines[:MAX_LISTED])
    more = f"\n    ... and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return MismatchError(
        f"the state and the checkpoint do not fit: {len(found.differences)} differ, "
        f"{len(found.missing)} missing, {len(found.unexpected)} unexpected\n    {shown}{more}",
        where=f"step {saved.manifest.step}",
        hint=hint
        + "rename= maps names, only= and weights_only= select, strict=False loads what fits"
        + (" and leaves an optimizer of another kind as it is; " if leaves.misfits else "; ")
        + "shapes and dtypes must agree in any case",
    )


def _missing(name: str, leaves: Leaves, saved: SavedState) -> str:
    if name not in (names := saved.names()):
        return f"{name}: missing in the checkpoint{_near(name, names)}"
    return f"{name}: wanted {_kind(name, leaves)}, found {_kind(name, saved)} in the checkpoint"


def _kind(name: str, names: Leaves | SavedState) -> str:
    if name in names.objects:
        return "a value"
    return "a value of each rank" if name in names.per_rank else "a tensor"


def _near(name: str, names: Iterable[str]) -> str:
    # Comparing with thousands of names is slow; names that share the last segment come first.
    tail = name.rpartition(".")[2]
    pool = [n for n in names if n.rpartition(".")[2] == tail][:200] or list(names)[:200]
    close = difflib.get_close_matches(name, pool, n=2, cutoff=0.6)
    return f" (nearest: {', '.join(close)})" if close else ""


def look(state: Mapping[str, Any]) -> Leaves:
    """Return the leaves of a state as it is, without making or encoding anything.

    Raises
    ------
    UsageError
        As `prepare`; kind ``unsavable``: a tensor is of a wrapper subclass.
    """
    nothing = SavedNames({})
    sink = Sink(nothing)
    collect(sink, walk(state, nothing))
    sink.leaves.refuse_wrapped("loaded with a layout, nor moved between live states")
    return sink.leaves


class PreparedState:
    """Memory of `prepare` of one state, load after load."""

    def __init__(self) -> None:
        self.known: tuple[SavedNames, KnownState] | None = None
        self.owners = ParameterOwners(())


def prepare(
    state: Mapping[str, Any],
    saved: SavedNames,
    device: torch.device | str | None = None,
    former: PreparedState | None = None,
) -> Leaves:
    """Return the leaves of `state` for a load; changes nothing.

    Optimizer state that was saved and is not there yet, tensors of objects that were saved and
    are not there yet, and memory for tensors on the meta device are made: they are the `tensor`
    of their leaves, and become part of the state in `apply_objects`.

    Parameters
    ----------
    state
        As for `ckptd.checkpoint.torch.state.flatten.flatten`.
    saved
        What this load is going to read.
    device
        Where tensors on the meta device get their memory; see `tensors.target_device`.
    former
        What the last call left. A state of which nothing has another place, memory or form is not
        looked through again for the same names.

    Raises
    ------
    UsageError
        As `flatten`; also.
    """
    target = None if device is None else torch.device(device)
    sites, sink = walk(state, saved), Sink(saved, target)
    modules = [(s.place, s.value) for s in sites if isinstance(s.value, nn.Module)]
    for place, module in modules:
        check_buffers(module, place)
        reshard(module)
    if former is not None and former.known is not None and former.known[0].fits(saved):
        # What cannot be added, or has another form, is looked at with all the rest.
        with suppress(CkptdError):
            if (leaves := former.known[1].again(sites, sink, former.owners)) is not None:
                return leaves
    owners = collect(sink, sites)
    materialise(sink.leaves, saved, [m for _, m in modules], target)
    if former is not None:
        found = KnownState.of(sites, sink) if not sink.leaves.pending else None
        former.known, former.owners = None if found is None else (saved, found), owners
    return sink.leaves


def apply_objects(
    leaves: Leaves,
    values: Mapping[str, Any],
    per_rank: Mapping[str, Any] | None = None,
    *,
    tensors: Collection[str] | None = None,
    required: Callable[[str], bool] | None = None,
    strict: bool = True,
) -> None:
    """Put everything into the state that is not the content of a tensor.

    Parameters
    ----------
    leaves
        What `prepare` returned, with the tensors filled.
    values
        Decoded values by object name. Objects that are not named keep their live value.
    per_rank
        By name: the decoded value of this rank, or what `PerRankLeaf.choose` gave.
    tensors
        Names of the leaves that were filled; None when all were, but for those of optimizers
        whose groups are not among `values`. Memory that was made for others does not enter the
        state: an optimizer must not find moments that no load has written.
    required, strict
        Of modules that take their state by code of their own: which names must be among what they
        are given, and how they are asked. Without `required`, all where all were filled.

    Raises
    ------
    MismatchError
        A value has no leaf or does not fit; nothing was changed.
    UsageError
        An object's ``load_state_dict`` or ``set_extra_state`` raised;: a meta tensor could not be
        replaced. The state is then partly loaded.
    """
    chosen = per_rank or {}
    check_objects(leaves, values, chosen)
    filled = leaves.tensors.keys() if tensors is None else set(tensors)
    for pending in leaves.pending:
        loaded = any(name in filled or name in values for name in pending.names)
        if loaded and (tensors is not None or not pending.unit or pending.unit in values):
            pending.change()
    leaves.pending.clear()
    for tensor in leaves.assigned():
        if tensor.assign is not None and tensor.name in filled:
            tensor.assign(tensor.tensor)
    # Modules first: an optimizer may look at its parameters, and a scheduler at its optimizer.
    handed = {name for handing in leaves.handing for name in handing.names}
    handed |= {name for path in leaves.paths for name in path.owned}
    objects = [leaf for name, leaf in leaves.objects.items() if name in values]
    for leaf in objects:
        if leaf.kind == "groups" or leaf.name in handed:
            leaf.put(values[leaf.name])
    every = tensors is None
    for path in leaves.paths:
        path.load(leaves, filled, required or (lambda name: every), strict=strict)
    for handing in leaves.handing:
        if any(name in filled or name in values for name in handing.names):
            handing.change()
    leaves.handing.clear()
    for leaf in objects:
        if leaf.kind != "groups" and leaf.name not in handed:
            leaf.put(values[leaf.name])
    # Random streams last: what came before may have drawn from them.
    own = [leaf for name, leaf in leaves.per_rank.items() if name in chosen]
    for mine in sorted(own, key=lambda v: v.random):
        value = chosen[mine.name]
        if isinstance(value, Reseed):
            if mine.reseed is not None:
                mine.reseed(value.seed)
        elif not isinstance(value, Dropped):
            mine.put(value)


def check_objects(leaves: Leaves, values: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
    """Raise `MismatchError` when `apply_objects` would; changes nothing."""
    unknown = [n for n in values if n not in leaves.objects]
    unknown += [n for n in per_rank if n not in leaves.per_rank]
    if unknown:
        raise MismatchError("values that the state does not have", found=first_few(unknown, 16))
    for name, value in values.items():
        check = leaves.objects[name].check
        if check is not None:
            check(value)
    for name, value in per_rank.items():
        if isinstance(value, Reseed) and leaves.per_rank[name].reseed is None:
            raise MismatchError("a value cannot be reseeded", where=name)


_UNKNOWN = b"?"
"""Of a rank that failed before it knew; its error is raised on all ranks."""


def without_place(
    agreement: Agreement, saved: SavedState | None, unexpected: Sequence[str]
) -> list[str]:
    """Return the names that no rank has a place for, the same on every rank.

    Stages of a pipeline have names that others lack, so that no rank can judge alone. Each rank
    marks what it has no place for in a bitmap of the checkpoint's names, which is packed, and ranks
    join theirs in a tree: what is left marked has no place anywhere. Most ranks of most jobs have
    nothing to mark, and post nothing.

    Parameters
    ----------
    saved
        The checkpoint; None where this rank failed, and does not know what it has a place for.
    unexpected
        Names of the checkpoint that this rank has no place for.
    """
    if agreement.board.world == 1:
        return list(unexpected)
    names: dict[str, int] = {}
    own = b"" if saved else _UNKNOWN
    if saved and unexpected:
        every = (*saved.tensors, *saved.objects, *saved.per_rank, *saved.aliases)
        names = {name: at for at, name in enumerate(dict.fromkeys(every))}
        marks = np.zeros(len(names), dtype=np.bool_)
        marks[[names[name] for name in unexpected]] = True
        own = zlib.compress(np.packbits(marks).tobytes())
    found = agreement.in_tree("unexpected", own, _joined)
    if not names or found in (b"", _UNKNOWN):
        return []
    left = np.unpackbits(_bits(found), count=len(names))
    return [name for name in dict.fromkeys(unexpected) if left[names[name]]]


def _joined(marks: list[bytes]) -> bytes:
    """Return the bitmap of what is marked in all."""
    known = {m for m in marks if m != _UNKNOWN}
    if not known or b"" in known:
        return b"" if known else _UNKNOWN
    if len(known) == 1:
        return known.pop()
    left = np.bitwise_and.reduce([_bits(m) for m in known])
    return zlib.compress(left.tobytes()) if left.any() else b""


def _bits(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(zlib.decompress(packed), dtype=np.uint8)
