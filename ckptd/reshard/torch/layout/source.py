"""A checkpoint of any layout as source of a live load: its program, names, dtypes, scalars."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptd.checkpoint.format.container import FileMap
from ckptd.checkpoint.format.manifest import about_foreign, foreign_sizes
from ckptd.checkpoint.torch.state.restore import SavedState
from ckptd.errors import CkptdError, MismatchError, UsageError
from ckptd.lay.bind import bind_stored
from ckptd.lay.copies import Composition, compose
from ckptd.lay.local import BoundTensor
from ckptd.lay.matching import Matcher, NameTemplates
from ckptd.lay.resolve import Bound
from ckptd.lay.stored import StoredForm, TensorKey
from ckptd.reshard.changes import changed_dtype
from ckptd.reshard.compose import source_keys
from ckptd.reshard.layouts import LayoutProgram, compare, read_text
from ckptd.reshard.torch.layout.binder import JobLayout
from ckptd.reshard.torch.layout.program import Spelling, refuse_quantized, spelling_of
from ckptd.types import DType

_log = logging.getLogger("ckptd")


def source_program(saved: SavedState, given: LayoutProgram | None, job: JobLayout) -> LayoutProgram:
    """Return the program of a checkpoint: the one given, the one it keeps, or the job's own.

    What foreign files hint at counts as kept if it fits.

    Raises
    ------
    UsageError
        ``lay-syntax``, ``lay-rule``: what it keeps is no program.
    """
    if given is not None:
        return given
    manifest = saved.manifest
    if manifest.lay:
        kept = read_text(manifest.lay, f"the program of step {manifest.step}")
        if not about_foreign(manifest) or _fits(kept, saved):
            return kept
    return job.program


def _fits(hint: LayoutProgram, saved: SavedState) -> bool:
    try:
        _Fitted.of(hint, saved)
    except CkptdError as error:
        _log.warning("the files suggest the layout %s, which does not fit: %s", hint.layout, error)
        return False
    return True


@dataclass(frozen=True)
class _Names:
    """The tensors of a checkpoint, by what its layout says of their names."""

    tensors: Mapping[str, int]
    scalars: Mapping[str, int]
    dropped: frozenset[str]


@dataclass(frozen=True)
class _Fitted:
    """A program, bound to the tensors of a checkpoint."""

    bound: Bound
    spelling: Spelling
    names: _Names

    @classmethod
    def of(cls, program: LayoutProgram, saved: SavedState) -> _Fitted:
        """Fit a program to a checkpoint; raises as `BoundSource`."""
        resolved = program.resolve()
        refuse_quantized(resolved)
        everything = {**saved.tensors, **{a: saved.tensors[n] for a, n in saved.aliases.items()}}
        groups = [n for n, i in saved.objects.items() if saved.manifest.objects[i].kind == "groups"]
        spelling = spelling_of(
            resolved,
            everything,
            [(n.removesuffix(".groups"), True) for n in groups],
            stored=True,
        )
        if spelling is None:
            raise _unknown(saved, program)
        resolved = spelling.put_into(resolved)
        names = _sorted(everything, NameTemplates(resolved), Matcher(resolved, stored=True))
        table = saved.manifest.tensors
        shapes = {n: table[i].shape for n, i in names.tensors.items()}
        sizes = foreign_sizes(saved.manifest)
        unsaid = {axis: n for axis, n in sizes.items() if axis not in resolved.sizes}
        return cls(bind_stored(resolved, shapes, unsaid), spelling, names)


class BoundSource:
    """The source of one load, composed with the job's layout.

    Parameters
    ----------
    job
        The layout of the live state.
    program
        The layout of the checkpoint.
    saved, filemap
        The checkpoint.

    Raises
    ------
    UsageError, MismatchError
        A layout does not fit the checkpoint, or the two do not fit each other.
    """

    def __init__(
        self, job: JobLayout, program: LayoutProgram, saved: SavedState, filemap: FileMap
    ) -> None:
        self.job = job
        self.saved = saved
        self.filemap = filemap
        fitted = _Fitted.of(program, saved)
        self.spelling: Spelling = fitted.spelling
        self.names = fitted.names
        self.composition: Composition = compose(fitted.bound, job.form.bound, self._grid)

    def _grid(self, name: str) -> Any:
        number = self.names.tensors.get(name)
        if number is None:
            raise MismatchError(
                "the checkpoint lacks this tensor", kind="lay-cover", where=name, wanted=name
            )
        return self.filemap.grid_of(number)

    def check_kept(self) -> None:
        """Compare the program with the one that the checkpoint keeps, if it keeps any.

        Raises
        ------
        MismatchError
            kind ``lay-fit``: they take an element for two different ones.
        """
        manifest = self.saved.manifest
        if not manifest.lay or about_foreign(manifest):
            return  # a hint is a guess, and the user's word goes before it
        try:
            kept = read_text(manifest.lay, f"the program of step {manifest.step}")
            bound = _Fitted.of(kept, self.saved).bound
        except CkptdError as error:
            # A kept program that cannot be read may be the reason why the user gives another one.
            _log.warning(
                "the layout stored with step %d was not compared: %s", manifest.step, error
            )
            return
        hint = 'omit source_layout; or give allow="layout"'
        found = compare(bound, self.form.bound, self.names.tensors, hint)
        if found.difference is not None:
            raise found.difference

    @property
    def form(self) -> StoredForm:
        """The stored form of the checkpoint's layout."""
        return self.composition.source

    @cached_property
    def rest(self) -> SavedState:
        """The saved values that the checkpoint's layout does not name."""
        known = {*self.names.tensors, *self.names.scalars, *self.names.dropped}
        tensors = {n: i for n, i in self.saved.tensors.items() if n not in known}
        aliases = {a: n for a, n in self.saved.aliases.items() if n in tensors and a not in known}
        return SavedState(
            self.saved.manifest, tensors, self.saved.objects, self.saved.per_rank, aliases
        )

    # --- where tensors come from ----------------------------------------------------------------

    def sources(self, rule: int, indexes: tuple[int, ...], state: str) -> dict[TensorKey, str]:
        """Return the stored source tensors that feed a target tensor, by their keys.

        Raises
        ------
        MismatchError
            ``lay-cover``: the source holds no such logical tensor, or not all of it.
        """
        return {k: self._name(k) for k in source_keys(self.composition, (rule, indexes, state))}

    def _name(self, key: TensorKey) -> str:
        rule, indexes, state = key
        return self.form.name(self.form.rules[rule].global_name(indexes), state)

    def dtype(self, tensor: BoundTensor) -> DType | None:
        """Return the type in which a tensor of this rank comes; None when nothing feeds it.

        Raises
        ------
        MismatchError
            ``lay-cover``: only a part of it is there. ``lay-fit``: parts come in different types.
        """
        if tensor.state not in self.form.states:
            return None
        found: dict[str, DType] = {}
        missing = []
        for piece in tensor.pieces:
            target = self.composition.target.rules[piece.rule]
            for key, name in self.sources(piece.rule, piece.indexes, tensor.state).items():
                number = self.names.tensors.get(name)
                if number is None:
                    missing.append(name)
                    continue
                values = self.composition.values(self.form.rules[key[0]], target, key[2])
                dtype = changed_dtype(self.filemap.dtypes[number], values, tensor.name)
                found[dtype.name] = dtype
        if not found:
            return None
        if missing or len(found) > 1:
            raise MismatchError(
                "the checkpoint holds only a part of a tensor"
                if missing
                else "parts of a tensor come in different types",
                kind="lay-cover" if missing else "lay-fit",
                where=tensor.name,
                wanted=", ".join(missing[:4]) or "one type, or a cast in the rule of the job",
                found=", ".join(found),
            )
        return next(iter(found.values()))

    def scalars(self, rule: int, indexes: tuple[int, ...], scalar: str) -> list[int]:
        """Return the numbers of the source's tensors that a parameter's scalar may come from."""
        layout = self.form.bound.layout
        out = []
        for number, at, _ in source_keys(self.composition, (rule, indexes, "")):
            name = layout.state_name(self.form.rules[number].global_name(at), scalar)
            if name in self.names.scalars:
                out.append(self.names.scalars[name])
        return list(dict.fromkeys(out))

    def unused(self) -> Iterator[str]:
        """Yield tensors that no rule of the job's layout has a place for, on any rank."""
        held = {f.name for r in self.composition.target.rules for f in r.equation.families.values()}
        for name in self.names.tensors:
            key = self.form.by_name.get(name)
            if key is None:
                continue
            families = self.form.rules[key[0]].equation.families.values()
            if key[2] not in self.composition.target.states or not any(
                f.name in held for f in families
            ):
                yield name

    # --- optimizer groups -----------------------------------------------------------------------

    def groups(self, value: Any) -> Any:
        """Return saved optimizer groups with the names that this rank has for parameters."""
        mine: dict[str, set[str]] = {}
        before, after = self.spelling.groups[1], self.job.spelling.groups[1]
        for local, (rule, indexes) in self.job.tensors.items():
            for number, at, _ in source_keys(self.composition, (rule, indexes, "")):
                stored = before + self.form.rules[number].global_name(at)
                mine.setdefault(stored, set()).add(after + local)
        out = []
        for group in value:
            names = {n for p in group["params"] for n in mine.get(p, {p} - self._known)}
            if names or not group["params"]:
                out.append({**group, "params": sorted(names)})
        return out

    @cached_property
    def _known(self) -> frozenset[str]:
        """Every parameter of the source, as groups call it: those of other ranks are left out."""
        before = self.spelling.groups[1]
        return frozenset(
            before + self.form.rules[rule].global_name(at)
            for rule, at, state in iter(self.form.keys())
            if not state
        )


def _sorted(names: Mapping[str, int], templates: NameTemplates, matcher: Matcher) -> _Names:
    tensors, scalars, dropped = {}, {}, set()
    for name, number in names.items():
        undressed = templates.take(name)
        if undressed is None:
            continue
        match = matcher.match(undressed.name)
        if match is None:
            continue
        if match.equation == -1:
            dropped.add(name)
        elif undressed.scalar:
            scalars[name] = number
        else:
            tensors[name] = number
    return _Names(tensors, scalars, frozenset(dropped))


def _unknown(saved: SavedState, program: LayoutProgram) -> UsageError:
    return UsageError(
        "the checkpoint's tensors are not those of the layout",
        kind="lay-use",
        where=f"step {saved.manifest.step}, layout {program.layout}",
        found=", ".join([*saved.tensors][:6]),
        hint="give its layout: load(..., source_layout=...)",
    )
