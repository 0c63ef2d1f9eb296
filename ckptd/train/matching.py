"""Which saved value goes to which live leaf, and everything that does not fit, in one error."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ckptd.errors import MismatchError
from ckptd.format.manifest import Manifest
from ckptd.train.leaves import Leaves, SavedNames

__all__ = ["Matching", "Saved", "match", "selector"]

_log = logging.getLogger("ckptd")

MAX_LISTED = 40


@dataclass(frozen=True)
class Saved:
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
    def of(manifest: Manifest) -> Saved:
        """Index a manifest."""
        encoded = {o.tensor for o in manifest.objects if o.tensor}
        tensors = {t.name: i for i, t in enumerate(manifest.tensors) if t.name not in encoded}
        aliases = {a: t.name for t in manifest.tensors for a in t.aliases}
        objects = {o.name: i for i, o in enumerate(manifest.objects) if not o.per_rank}
        per_rank = {o.name: i for i, o in enumerate(manifest.objects) if o.per_rank}
        return Saved(manifest, tensors, objects, per_rank, aliases)

    def doubtful(self) -> list[str]:
        """Return the names that mean several things: a tensor and a value, or a rank's own."""
        kinds = ({*self.tensors, *self.aliases}, self.objects.keys(), self.per_rank.keys())
        counts = Counter(name for kind in kinds for name in kind)
        return sorted(name for name, n in counts.items() if n > 1)

    def names(self) -> set[str]:
        """Return every name."""
        return {*self.tensors, *self.objects, *self.per_rank, *self.aliases}


@dataclass
class Matching:
    """What a load will fill: live name to number in the manifest's table."""

    tensors: dict[str, int] = field(default_factory=dict)
    objects: dict[str, int] = field(default_factory=dict)
    per_rank: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def selector(only: str | Iterable[str] | Callable[[str], bool] | None) -> Callable[[str], bool]:
    """Turn the `only` argument into a test on names."""
    if only is None:
        return lambda name: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else list(only)
    return lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns)


def saved_names(
    saved: Saved, live: Callable[[str], str], wanted: Callable[[str], bool]
) -> SavedNames:
    """Return the manifest's contents in live names, as `ckptd.train.restore.prepare` wants them."""
    table = saved.manifest.tensors
    return SavedNames(
        tensors={
            live(n): (table[i].dtype, table[i].shape)
            for n, i in saved.tensors.items()
            if wanted(live(n))
        },
        objects={
            live(n): saved.manifest.objects[i].kind
            for n, i in saved.objects.items()
            if wanted(live(n))
        },
        aliases={live(a): live(n) for a, n in saved.aliases.items() if wanted(live(a))},
        groups={
            live(n): saved.manifest.objects[i].value
            for n, i in saved.objects.items()
            if saved.manifest.objects[i].kind == "groups" and wanted(live(n))
        },
    )


def match(
    leaves: Leaves,
    saved: Saved,
    wanted: Callable[[str], bool],
    to_saved: Callable[[str], str],
    *,
    strict: bool,
) -> Matching:
    """Pair live leaves with saved entries.

    Raises
    ------
    MismatchError
        kind ``mismatch``: lists every missing and unexpected name (unless `strict` is False) and
        every difference of shape or dtype, with the nearest names.
    """
    found = Matching()
    differences: list[str] = []
    used: set[str] = set()
    for name, leaf in leaves.tensors.items():
        if not wanted(name):
            continue
        source = next(
            (
                s
                for s in map(to_saved, (name, *leaf.aliases))
                if s in saved.tensors or s in saved.aliases
            ),
            None,
        )
        if source is None:
            found.missing.append(name)
            continue
        source = saved.aliases.get(source, source)
        used.add(source)
        entry = saved.manifest.tensors[saved.tensors[source]]
        if (entry.dtype, entry.shape) == (leaf.dtype, leaf.shape):
            found.tensors[name] = saved.tensors[source]
        else:
            differences.append(
                f"{name}: wanted {leaf.dtype}{list(leaf.shape)}, "
                f"found {entry.dtype}{list(entry.shape)}"
            )
    _match_objects(found, leaves, saved, wanted, to_saved, used)
    live_names = {to_saved(n) for n in (*leaves.tensors, *leaves.objects, *leaves.per_rank)}
    everything = [*saved.tensors, *saved.objects, *saved.per_rank]
    known = used | live_names
    # A checkpoint with two things under one name does not say which of them is meant.
    doubtful = [n for n in saved.doubtful() if wanted(n)]
    found.unexpected = [n for n in everything if n not in known and wanted(n)]
    found.unexpected += [n for n in doubtful if n in known]
    misfits = {n: why for n, why in leaves.misfits.items() if wanted(f"{n}.groups")}
    if strict:
        differences += [f"{n}: {why}" for n, why in misfits.items()]
        # One line says of all of them why they have no place here.
        below = tuple(f"{n}." for n in misfits)
        found.unexpected = [n for n in found.unexpected if not n.startswith(below)]
        differences += [f"{n}: both a tensor and a value in the checkpoint" for n in doubtful]
    if differences or (strict and (found.missing or found.unexpected)):
        raise _error(found, differences, saved, leaves, strict)
    for name, why in misfits.items():
        _log.warning("%s keeps its own state: %s", name, why)
        found.missing.append(f"{name}.groups")
    return found


def _match_objects(
    found: Matching,
    leaves: Leaves,
    saved: Saved,
    wanted: Callable[[str], bool],
    to_saved: Callable[[str], str],
    used: set[str],
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
            else:
                found.missing.append(name)


def _error(
    found: Matching, differences: list[str], saved: Saved, leaves: Leaves, strict: bool
) -> MismatchError:
    lines = list(differences)
    if strict:
        lines += [f"{n}: missing in the checkpoint{_near(n, saved.names())}" for n in found.missing]
        live = {*leaves.tensors, *leaves.objects, *leaves.per_rank}
        lines += [f"{n}: not in the live state{_near(n, live)}" for n in found.unexpected]
    shown = "\n    ".join(lines[:MAX_LISTED])
    more = f"\n    ... and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
    return MismatchError(
        f"the state and the checkpoint do not fit: {len(differences)} differ, "
        f"{len(found.missing)} missing, {len(found.unexpected)} unexpected\n    {shown}{more}",
        where=f"step {saved.manifest.step}",
        hint="rename= maps names, only= and weights_only= select, strict=False loads what fits"
        + (" and leaves an optimizer of another kind as it is; " if leaves.misfits else "; ")
        + "shapes and dtypes must agree in any case",
    )


def _near(name: str, names: Iterable[str]) -> str:
    # Comparing with thousands of names is slow; names that share the last segment come first.
    tail = name.rpartition(".")[2]
    pool = [n for n in names if n.rpartition(".")[2] == tail][:200] or list(names)[:200]
    close = difflib.get_close_matches(name, pool, n=2, cutoff=0.6)
    return f" (nearest: {', '.join(close)})" if close else ""
