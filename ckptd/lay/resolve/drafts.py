"""Order of a layout's rules: own ones, ``use``, overrides, ``default`` wraps, alternatives.

In it: limits of rules, nesting and pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckptd.errors import UsageError
from ckptd.lay.resolve.finding import Finding
from ckptd.lay.resolve.lets import Lets
from ckptd.lay.resolve.pattern import encoded, filled, rule_regex
from ckptd.lay.resolve.sources import ProgramSource
from ckptd.lay.syntax import show, tree

_MAX_DEPTH = 16
_MAX_WAYS = 64
_MAX_HEIGHT = 64
_MAX_RULES = 16_384
_MAX_PAIRS = 4_000_000


@dataclass(frozen=True)
class Draft:
    """A rule on its way to an equation: lets and alternatives are put in, nothing is looked up.

    Attributes
    ----------
    lets
        Those of its file.
    near
        References of the rule that it overrides: where a short reference is looked for first.
    level
        How many layouts deep it comes from: 0 is the layout itself.
    """

    name: tree.Name
    reference: tree.Name | None
    dims: tuple[tree.Dim, ...]
    modifiers: tuple[tree.Modifier, ...]
    at: tree.Position
    text: str
    lets: Lets
    near: tuple[tree.Name, ...] = ()
    level: int = 0


@dataclass
class Drafts:
    """The rules of a layout.

    Attributes
    ----------
    rules
        First match wins.
    spaces
        Names of the spaces of all layouts in it, its own first; some may be empty.
    stored
        Name templates, if it or a layout it uses says them.
    findings
        Rules that are wrong, and left out.
    """

    layout: tree.Layout
    rules: list[Draft] = field(default_factory=list)
    spaces: list[str] = field(default_factory=list)
    stored: tree.Stored | None = None
    others: list[tree.Stored] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def draft(
    source: ProgramSource,
    name: str,
    at: tree.Position = tree.NOWHERE,
    inside: tuple[str, ...] = (),
    known: dict[str, Drafts] | None = None,
) -> Drafts:
    """Return the rules of a layout.

    Raises
    ------
    UsageError
        ``lay-rule``: there is no such layout, or layouts use each other in a circle.
    """
    if name in inside or len(inside) == _MAX_DEPTH:
        raise UsageError(f"layout {name} uses itself", kind="lay-rule", where=_place(at))
    # Layouts that several others use are looked up once: each of them may use another one twice.
    known = {} if known is None else known
    found = known.get(name)
    if found is None:
        found = known[name] = _drafted(source, name, at, inside, known)
    return found


def _drafted(
    source: ProgramSource,
    name: str,
    at: tree.Position,
    inside: tuple[str, ...],
    known: dict[str, Drafts],
) -> Drafts:
    layout, file = source.layout(name, at)
    # A file's beginnings of names are its own; the program's word for a size goes before a file's.
    beside = source.lets_of(file)
    lets = Lets.of(source.own_lets(), beside)
    lets.names |= Lets.of(beside).names
    out = Drafts(layout, spaces=[layout.space])
    imported = _imported(source, out, (*inside, name), known)
    own = [d for s in layout.statements if isinstance(s, tree.Rule) for d in _own(s, lets, out)]
    left = _override(out, own, imported)
    defaults = [s for s in layout.statements if isinstance(s, tree.Default)]
    out.rules += _wrapped(out, left, [_with_lets(d, lets) for d in defaults])
    own_stored = [s for s in layout.statements if isinstance(s, tree.Stored)]
    whole = [s for s in own_stored if s.names is None]
    if own_stored:
        # A program that says how states are called says it for all of them.
        out.stored = whole[0] if whole else out.stored
        out.others = [s for s in own_stored if s.names is not None]
    # What several ways lead to is said once.
    out.spaces = list(dict.fromkeys(out.spaces))
    out.findings = list(dict.fromkeys(out.findings))
    if len(out.rules) > _MAX_RULES:
        raise UsageError(
            f"layout {name} has more than {_MAX_RULES} rules", kind="lay-rule", where=_place(at)
        )
    return out


def is_drop(rule: Draft) -> bool:
    """Whether a rule leaves tensors out."""
    return any(isinstance(m, tree.Drop) for m in rule.modifiers)


def _imported(
    source: ProgramSource, out: Drafts, inside: tuple[str, ...], known: dict[str, Drafts]
) -> list[Draft]:
    """Return the rules of all layouts that a layout uses; the first of two alike counts."""
    rules: list[Draft] = []
    used: set[str] = set()
    for use in out.layout.statements:
        if not isinstance(use, tree.Use) or use.name in used:
            continue
        used.add(use.name)
        found = draft(source, use.name, use.at, inside, known)
        out.spaces += found.spaces
        out.findings += found.findings
        out.others = out.others if out.stored else found.others
        out.stored = out.stored or found.stored
        if len(used) * (len(rules) + len(found.rules)) > _MAX_PAIRS:
            raise _too_much(out.layout.name, use.at)
        names = {encoded(rule.name) for rule in rules}
        rules += [
            replace(rule, level=rule.level + 1)
            for rule in found.rules
            if encoded(rule.name) not in names
        ]
    return rules


# --- a layout's own rules -----------------------------------------------------------------------


def _own(rule: tree.Rule, lets: Lets, out: Drafts) -> Iterator[Draft]:
    """Yield a rule, once for each alternative."""
    text = show(rule)
    try:
        for name, reference in _alternatives(rule):
            yield Draft(
                _name(name, lets),
                reference,
                rule.dims,
                tuple(_modifier(m, lets) for m in rule.modifiers),
                rule.at,
                text,
                lets,
            )
    except UsageError as error:
        out.findings.append(Finding("name", error.message, rule.at, text))


def _name(name: tree.Name, lets: Lets) -> tree.Name:
    found = lets.name(name)
    parts = (lets.index(p) if isinstance(p, tree.NameIndex) else p for p in found.parts)
    return tree.Name(tuple(parts), at=found.at)


def _modifier(modifier: tree.Modifier, lets: Lets) -> tree.Modifier:
    if isinstance(modifier, tree.FollowRows):
        return replace(modifier, name=_name(modifier.name, lets))
    return modifier


def _alternatives(rule: tree.Rule) -> Iterator[tuple[tree.Name, tree.Name | None]]:
    """Yield the name and the reference of a rule for each of its alternatives, in step."""
    names = [rule.name, *([rule.reference] if rule.reference else [])]
    counts = {len(p.texts) for n in names for p in n.parts if isinstance(p, tree.Alternatives)}
    if len(counts) > 1 or max(counts, default=1) > _MAX_WAYS:
        raise UsageError(
            f"alternatives go in step, so each pair of braces has as many (at most {_MAX_WAYS})",
            kind="lay-rule",
        )
    for k in range(max(counts, default=1)):
        reference = _alternative(rule.reference, k) if rule.reference else None
        yield _alternative(rule.name, k), reference


def _alternative(name: tree.Name, k: int) -> tree.Name:
    parts = (tree.Text(p.texts[k]) if isinstance(p, tree.Alternatives) else p for p in name.parts)
    return tree.Name(tree.join(parts), at=name.at)


# --- rules that override imported ones ----------------------------------------------------------


def _override(out: Drafts, own: Sequence[Draft], imported: Sequence[Draft]) -> list[Draft]:
    """Add a layout's own rules, with what they take over; return the imported rules left."""
    taken: dict[int, Draft] = {}
    if len(own) * len(imported) > _MAX_PAIRS:
        raise _too_much(out.layout.name, out.layout.at)
    for rule in own:
        try:
            regex = rule_regex(rule.name)
        except UsageError as error:
            out.findings.append(Finding("name", error.message, rule.at, rule.text))
            continue
        matches = [
            (k, m)
            for k, other in enumerate(imported)
            if (m := regex.fullmatch(encoded(other.name)))
        ]
        fresh = [(k, m) for k, m in matches if k not in taken]
        for k, match in fresh:
            if not any(isinstance(m, tree.For) for m in rule.modifiers):
                # What 'for' leaves out is still the imported rule's.
                taken[k] = rule
            over = _taken_over(rule, imported[k], match.groups())
            if isinstance(over, Finding):
                out.findings.append(over)
            else:
                out.rules.append(over)
        if matches and not fresh and not is_drop(rule):
            out.findings.append(_useless(rule, taken[matches[0][0]]))
        elif not matches or is_drop(rule):
            out.rules.append(rule)
    return [rule for k, rule in enumerate(imported) if k not in taken]


def _too_much(name: str, at: tree.Position) -> UsageError:
    return UsageError(
        f"layout {name} overrides too many rules by too many: more than {_MAX_PAIRS} pairs",
        kind="lay-rule",
        where=_place(at),
    )


def _taken_over(rule: Draft, other: Draft, texts: tuple[str, ...]) -> Draft | Finding:
    """Return a rule with the name, and where it says so the dimensions, of an imported one."""
    indexes = [p for p in other.name.parts if isinstance(p, tree.NameIndex)]
    name = filled(rule.name, texts, indexes)
    near = (other.reference,) if other.reference else ()
    if _follows(rule) or is_drop(rule):
        return replace(rule, name=name, near=near)
    dims: tuple[tree.Dim, ...] | None = rule.dims
    if any(map(_wilds, rule.dims)):
        dims = wrapped(rule.dims, tuple(other.lets.dim(d) for d in other.dims))
    if dims is None or max(map(height, dims), default=0) > _MAX_HEIGHT:
        message = f"'_' and '...' do not fit the {len(other.dims)} dimensions of {show(other.name)}"
        return Finding("wild", message, rule.at, rule.text)
    return replace(rule, name=name, dims=dims, near=near)


def _useless(rule: Draft, other: Draft) -> Finding:
    return Finding(
        "shadowed",
        "this rule is never used: an earlier one has taken all that it matches",
        rule.at,
        rule.text,
        (f"taken by {_place(other.at)}  {other.text}",),
    )


# --- defaults -----------------------------------------------------------------------------------


def _with_lets(default: tree.Default, lets: Lets) -> tree.Default:
    return replace(default, dims=tuple(lets.dim(d) for d in default.dims))


def _wrapped(
    out: Drafts, rules: Sequence[Draft], defaults: Sequence[tree.Default]
) -> Iterator[Draft]:
    """Yield imported rules, each wrapped by the first default that fits its dimensions."""
    for default in defaults:
        wrong = _wrong_default(default)
        if wrong:
            out.findings.append(Finding("wild", wrong, default.at, show(default)))
            return
    for rule in rules:
        if is_drop(rule) or not rule.dims or _follows(rule):
            yield rule
            continue
        for default in defaults:
            dims = wrapped(default.dims, rule.dims)
            if dims is not None and max(map(height, dims)) > _MAX_HEIGHT:
                message = "defaults of defaults nest too deeply"
                out.findings.append(Finding("wild", message, default.at, show(default)))
                break
            if dims is not None:
                kinds = {type(m) for m in default.modifiers}
                kept = tuple(m for m in rule.modifiers if type(m) not in kinds)
                yield _rewritten(rule, default, dims, (*kept, *default.modifiers))
                break
        else:
            yield rule


def _rewritten(
    rule: Draft,
    default: tree.Default,
    dims: tuple[tree.Dim, ...],
    modifiers: tuple[tree.Modifier, ...],
) -> Draft:
    text = show(tree.Rule(rule.name, rule.reference, dims, modifiers))
    return replace(rule, dims=dims, modifiers=modifiers, at=default.at, text=text)


def _follows(rule: Draft) -> bool:
    """Whether the dimensions of a rule come from another one, and are not there yet."""
    return any(
        isinstance(m, tree.FollowRows) or (isinstance(m, tree.Alias) and not rule.dims)
        for m in rule.modifiers
    )


def wrapped(pattern: Sequence[tree.Dim], dims: Sequence[tree.Dim]) -> tuple[tree.Dim, ...] | None:
    """Return dimensions put into ``_`` and ``...`` of a pattern; None if they do not fit."""
    rest = [k for k, d in enumerate(pattern) if isinstance(d, tree.Rest)]
    more = len(dims) - (len(pattern) - len(rest))
    if more < 0 or (more and not rest):
        return None
    out: list[tree.Dim] = []
    left = list(dims)
    for part in pattern:
        if isinstance(part, tree.Rest):
            out += left[:more]
            del left[:more]
        else:
            out.append(_filled(part, left.pop(0)))
    return tuple(out)


def _wrong_default(default: tree.Default) -> str | None:
    if any(isinstance(m, tree.For) for m in default.modifiers):
        return "''for' selects names of a rule: it belongs in rules"
    if sum(isinstance(d, tree.Rest) for d in default.dims) > 1:
        return "'...' means all further dimensions, so it can occur once"
    if any(_wilds(d) != 1 for d in default.dims if not isinstance(d, tree.Rest)):
        return "each dimension of a default has one '_', the imported dimension at its place"
    return None


def height(dim: tree.Dim) -> int:
    """Return how deep a dimension nests; without recursion, so that it may be deep."""
    found = 0
    stack = [(dim, 1)]
    while stack:
        node, level = stack.pop()
        found = max(found, level)
        match node:
            case tree.Split() | tree.Pad():
                stack.append((node.inner, level + 1))
            case tree.Product():
                stack += [(p, level + 1) for p in node.parts]
            case tree.Sum():
                stack += [(b.dim, level + 1) for b in node.branches]
    return found


def _wilds(dim: tree.Dim) -> int:
    match dim:
        case tree.Wild() | tree.Rest():
            return 1
        case tree.Split() | tree.Pad():
            return _wilds(dim.inner)
        case tree.Product():
            return sum(map(_wilds, dim.parts))
        case tree.Sum():
            return sum(_wilds(b.dim) for b in dim.branches)
    return 0


def _filled(pattern: tree.Dim, dim: tree.Dim) -> tree.Dim:
    """Return a dimension of a pattern with another put in for ``_``."""
    match pattern:
        case tree.Wild():
            return dim
        case tree.Split() | tree.Pad():
            return replace(pattern, inner=_filled(pattern.inner, dim))
        case tree.Product():
            return replace(pattern, parts=tuple(_filled(p, dim) for p in pattern.parts))
        case tree.Sum():
            found = tuple(replace(b, dim=_filled(b.dim, dim)) for b in pattern.branches)
            return replace(pattern, branches=found)
    return pattern


def _place(at: tree.Position) -> str:
    return f"{at.file}:{at.line}" if at.line else "elsewhere"


def has_globs(name: tree.Name) -> bool:
    """Whether a name represents several patterns."""
    return any(isinstance(p, tree.Glob) for p in name.parts)
