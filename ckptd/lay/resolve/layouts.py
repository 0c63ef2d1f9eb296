"""Looks a whole layout up: spaces, states, meshes, sizes, flats, pipes, files.

What a rule may leave out, and where it comes from:

- A rule whose name matches names of a layout that is used (``**.q_proj.weight``) overrides those
  rules: it takes over their names, and where it has ``_`` or ``...`` their dimensions.
- ``use`` of a layout without rules (``fsdp``, ``zero1``) says what that layout says: how imported
  rules are wrapped, which buffers there are. Of a layout with rules it takes over these only.
- A reference may be the end of a tensor's name (``q``); the rule's sums append their tags.
- ``alias E`` without dimensions takes those of the rule that holds E.
- ``follow rows(linear_qkv)`` takes the first dimension of that rule. The tensors that it leads to
  are those of the rule, named with ``.lora_B`` behind (or with what stands as the reference), with
  the axes of the rows and then of the other dimensions; ``[_ r]`` unless dimensions are written.
  A ``**`` at the beginning of the name represents the followed rule's name without ``.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckptd.errors import UsageError
from ckptd.lay.resolve.cut import ValueScope, evaluate
from ckptd.lay.resolve.drafts import draft
from ckptd.lay.resolve.equation import Equation, MeshShape, Resolved
from ckptd.lay.resolve.families import Families
from ckptd.lay.resolve.finding import Finding, raise_first
from ckptd.lay.resolve.lets import Lets
from ckptd.lay.resolve.mesh import mesh_shape
from ckptd.lay.resolve.pipe import stage_parts
from ckptd.lay.resolve.rules import RuleTable
from ckptd.lay.resolve.sources import Loader, ProgramSource
from ckptd.lay.syntax import show, tree


def resolve(files: Sequence[tree.File], layout: str, load: Loader | None = None) -> Resolved:
    """Look a layout up.

    Parameters
    ----------
    files
        The program. Spaces and refined atoms are shared by all of them.
    layout
        Its name; that of a shipped layout as well.
    load
        Returns shipped files by name; `ckptd.lay.syntax.load` when left out.

    Raises
    ------
    UsageError
        ``lay-rule``: something is named that does not exist, or a rule cannot be understood.
        ``where`` is the file, the line and the rule.
    """
    found, findings = resolve_all(files, layout, load)
    raise_first(findings)
    return found


def resolve_all(
    files: Sequence[tree.File], layout: str, load: Loader | None = None
) -> tuple[Resolved, list[Finding]]:
    """Look a layout up, and return what is wrong with its rules; those are left out.

    Raises
    ------
    UsageError
        ``lay-rule``: the layout, its space or a mesh does not exist, or is wrong.
    """
    source = ProgramSource(files, load or _shipped)
    drafts = draft(source, layout)
    space = source.space(drafts.layout, drafts.spaces)
    lets = Lets.of(source.own_lets(), space.lets, source.shipped_lets())
    meshes = [source.mesh(name, drafts.layout.at) for name in drafts.layout.meshes]
    mesh = mesh_shape(meshes) if meshes else None
    families = Families(space, lets)
    rules = RuleTable(families, lets)
    rules.add(drafts.rules)
    stated = _Statements.of(drafts.layout, lets)
    findings = [*drafts.findings, *rules.findings, *_two_meanings(rules.equations, mesh)]
    sizes = _Sizes.of(lets, families, mesh, findings)
    _check_pipes(stated.pipes, mesh, findings)
    stored = drafts.stored or tree.Stored()
    found = Resolved(
        name=drafts.layout.name,
        space=space.name,
        mesh=mesh,
        equations=tuple(rules.equations),
        families=families.by_name,
        sizes=sizes.numbers,
        refined={a: lets.dim(tree.Atom(a)) for a in sorted(families.refined)},
        states=_states(space.states, stored, findings),
        scalars=space.scalars,
        flats=stated.flats,
        pipes=stated.pipes,
        objects=stated.objects,
        drops=tuple(name for name, _ in rules.drops),
        drop_places=tuple(place for _, place in rules.drops),
        relations=sizes.relations,
        params=stored.params,
        state_names=stored.states,
        other_states=tuple((lets.name(s.names), s.states) for s in drafts.others if s.names),
        files=stated.files,
    )
    return found, findings


def _states(
    states: Sequence[tree.FollowedState], stored: tree.Stored, findings: list[Finding]
) -> tuple[tree.FollowedState, ...]:
    """Return the states of a space with the names that a layout stores them under."""
    # A space without states has nothing to rename: recipes of names go over weights alone too.
    renamed = {s.name: s for s in stored.renamed} if states else {}
    for name in renamed.keys() - {s.name for s in states}:
        message = f"the space has no state {name}"
        findings.append(Finding("state", message, stored.at, show(stored)))
    return tuple(renamed.get(s.name, s) for s in states)


def _shipped(name: str) -> tree.File:
    # Imported when it is asked for: the shipped files are resolved by this very module.
    from ckptd.lay.syntax import load

    return load(name)


@dataclass(frozen=True)
class _Statements:
    """Statements of a layout besides its rules."""

    flats: tuple[tree.Flat, ...]
    pipes: tuple[tree.Pipe, ...]
    objects: tuple[tree.Object, ...]
    files: tree.Name | None

    @classmethod
    def of(cls, layout: tree.Layout, lets: Lets) -> _Statements:
        """Take the statements out of a layout."""
        files = [s.name for s in layout.statements if isinstance(s, tree.Files)]
        return cls(
            tuple(_flat(s, lets) for s in layout.statements if isinstance(s, tree.Flat)),
            tuple(s for s in layout.statements if isinstance(s, tree.Pipe)),
            tuple(s for s in layout.statements if isinstance(s, tree.Object)),
            files[0] if files else None,
        )


@dataclass(frozen=True)
class _Sizes:
    """Sizes of axes that a program states, as numbers and by other sizes."""

    numbers: dict[str, int]
    relations: dict[str, tree.Value]

    @classmethod
    def of(
        cls, lets: Lets, families: Families, mesh: MeshShape | None, findings: list[Finding]
    ) -> _Sizes:
        """Take the sizes out of lets."""
        axes = {a for f in families.by_name.values() for a in f.axes} | families.refined
        out = cls({}, {})
        for name in sorted(axes & set(lets.values)):
            let = lets.values[name]
            try:
                value = lets.value(let.value)  # type: ignore[arg-type]
                out._add(name, value, mesh)
            except UsageError as error:
                findings.append(Finding("size", error.message, let.at, f"let {name}"))
        return out

    def _add(self, name: str, value: tree.Value, mesh: MeshShape | None) -> None:
        extents = mesh.extents if mesh else {}
        if _names(value) <= set(extents):
            self.numbers[name] = evaluate(value, ValueScope({}, extents))
        else:
            self.relations[name] = value


def _two_meanings(equations: Iterable[Equation], mesh: MeshShape | None) -> Iterator[Finding]:
    """Yield names with an index that may be an axis of the tensor, or the coordinate of a rank."""
    for equation in equations:
        axes = {a for f in equation.families.values() for a in f.axes}
        for part in equation.name.parts:
            if isinstance(part, tree.NameIndex) and mesh and part.axis in axes & set(mesh.extents):
                message = (
                    f"{part.axis} is an axis of the tensor and an axis of the mesh: {show(part)} "
                    f"in a name may be either"
                )
                note = f"rename the mesh axis: mesh M = {part.axis}p:..., and @{part.axis}p"
                yield Finding("index", message, equation.at, equation.text, (note,))


def _check_pipes(
    pipes: Iterable[tree.Pipe], mesh: MeshShape | None, findings: list[Finding]
) -> None:
    for pipe in pipes:
        try:
            stage_parts(pipe, mesh or MeshShape(1, {}, {}))
        except UsageError as error:
            findings.append(Finding("pipe", error.message, pipe.at, show(pipe)))


def _flat(flat: tree.Flat, lets: Lets) -> tree.Flat:
    """Return a flat with lets put in."""
    group = flat.group
    if group.name is not None:
        group = replace(group, name=lets.name(group.name))
    axis, how = flat.split
    start, end = lets.value(flat.start), lets.value(flat.end)
    called = None if flat.called is None else lets.name(flat.called)
    cut = axis, lets.how(how)
    return replace(flat, group=group, split=cut, start=start, end=end, called=called)


def _names(value: tree.Value) -> set[str]:
    if isinstance(value, tree.Arithmetic):
        return _names(value.left) | _names(value.right)
    return set() if isinstance(value, tree.Number) else {value.name}
