"""Solver of sizes from observed lengths: single unknowns, products, ratios; contradictions.

Each observed length is an equation between a polynomial over sizes and a number. What is declared
counts first. Then, to a fixed point: equations with one unknown are solved; unknown products are
solved for together, as a linear system (``kv*rep*hd + 2*kv*hd = 6144`` and ``kv*rep*hd = 4096``
give both products); and sizes follow from ratios of known products. All in exact fractions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ckptd.errors import CkptdError
from ckptd.lay.bind.lengths import (
    Derived,
    Lengths,
    Monomial,
    Padded,
    Polynomial,
    of_value,
    substituted,
)
from ckptd.lay.bind.system import linear, ratios
from ckptd.lay.boxes import padded
from ckptd.lay.resolve import Finding, ValueScope, evaluate, part
from ckptd.lay.syntax.tree import NOWHERE, One, Pad, Position, Value

_MAX_ROUNDS = 1000


@dataclass(frozen=True)
class Origin:
    """Where a constraint comes from.

    Attributes
    ----------
    at, rule
        The rule.
    what
        What was observed: ``dimension 0 of model.norm.weight [4096]``.
    """

    at: Position = NOWHERE
    rule: str = ""
    what: str = ""

    def __str__(self) -> str:
        place = f"{self.at.file}:{self.at.line}" if self.at.line else ""
        return "  ".join(t for t in (place, self.rule, self.what) if t)


@dataclass(frozen=True)
class Constraint:
    """``polynomial = total``."""

    polynomial: Polynomial
    total: int
    origin: Origin


@dataclass
class Solution:
    """The sizes that follow from what was observed, and contradictions.

    Attributes
    ----------
    sizes
        Sizes of axes, as far as they are known.
    origins
        Origin of each size.
    products
        Products of unknown sizes of which the value is known.
    bounds
        Lowest and highest size that padding leaves open.
    findings
        Contradictions.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    products: dict[Monomial, Fraction] = field(default_factory=dict)
    bounds: dict[str, tuple[int, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def solve(
    constraints: Iterable[Constraint],
    lengths: Lengths,
    declared: Mapping[str, int],
    relations: Mapping[str, Value] | None = None,
) -> Solution:
    """Find sizes.

    Parameters
    ----------
    constraints
        Of observed lengths.
    lengths
        What made their polynomials.
    declared
        Sizes that the program or the caller states. They win: lengths that contradict them are
        findings.
    relations
        Sizes that the program states by other sizes.
    """
    solver = _Solver(lengths, _unique(constraints))
    for name, value in (relations or {}).items():
        solver.relate(name, value)
    for name, number in declared.items():
        solver.learn(name, Fraction(number), Origin(what="a let, or sizes given with the program"))
    solver.run()
    return solver.out


def _unique(constraints: Iterable[Constraint]) -> list[Constraint]:
    """Return each constraint once, with the first origin."""
    seen: dict[object, Constraint] = {}
    for constraint in constraints:
        key = (tuple(sorted(constraint.polynomial.items())), constraint.total)
        seen.setdefault(key, constraint)
    return list(seen.values())


class _Solver:
    """The fixed point."""

    def __init__(self, lengths: Lengths, constraints: Sequence[Constraint]) -> None:
        self.out = Solution()
        self._lengths = lengths
        self._open = list(constraints)
        self._derived = dict(lengths.derived)
        self._late: dict[str, Value] = {}

    @property
    def _known(self) -> dict[str, int]:
        return self.out.sizes

    def relate(self, name: str, value: Value) -> None:
        """Take a size that is stated by others."""
        polynomial = of_value(value, self._lengths.extents)
        if polynomial is None:
            self._late[name] = value
            return
        negative = {m: -f for m, f in polynomial.items()}
        negative[(name,)] = negative.get((name,), Fraction(0)) + 1
        self._open.append(Constraint(negative, 0, Origin(what=f"let {name} = ...")))

    def learn(self, name: str, value: Fraction, origin: Origin) -> bool:
        """Note a size; whether it is one, and new."""
        if name in self._known:
            return False
        if value.denominator != 1 or value < 0:
            if not name.startswith("#"):
                message = (
                    f"{origin.what} would make {name} = {_number(value)}, which is not a length"
                )
                self._tell(message, origin)
            return False
        self._known[name] = int(value)
        self.out.origins[name] = origin
        return True

    def _tell(self, message: str, origin: Origin, names: Iterable[str] = ()) -> None:
        notes = tuple(f"{n} = {self._known[n]} by {self.out.origins[n]}" for n in names)
        finding = Finding("sizes", message, origin.at, origin.rule, notes, fit=True)
        if finding not in self.out.findings:
            self.out.findings.append(finding)

    def run(self) -> None:
        """Solve until nothing more follows."""
        for _ in range(_MAX_ROUNDS):
            if not (self._single() or self._forward() or self._joint()):
                break
        self._bounds()

    def _single(self) -> bool:
        """Solve constraints with one unknown; check those with none."""
        progress = False
        left = []
        for constraint in self._open:
            rest = substituted(constraint.polynomial, self._known)
            unknown = {name for monomial in rest for name in monomial}
            if not unknown:
                self._check(constraint, rest.get((), Fraction(0)))
            elif len(unknown) == 1 and all(len(m) <= 1 for m in rest):
                name = unknown.pop()
                value = (constraint.total - rest.get((), Fraction(0))) / rest[(name,)]
                progress |= self.learn(name, value, constraint.origin)
            else:
                left.append(constraint)
        self._open = left
        return progress

    def _check(self, constraint: Constraint, value: Fraction) -> None:
        if value == constraint.total:
            return
        names = self._atoms_of(n for m in constraint.polynomial for n in m)
        sizes = " ".join(f"{n}={self._known[n]}" for n in names)
        origin = constraint.origin
        message = f"{origin.what} has length {constraint.total}, and {sizes} make it"
        self._tell(f"{message} {_number(value)}", origin, names)

    def _atoms_of(self, names: Iterable[str]) -> list[str]:
        """Return the known sizes behind some unknowns."""
        out: set[str] = set()
        stack = list(names)
        while stack:
            name = stack.pop()
            if name in self._lengths.derived:
                inner = self._lengths.derived[name].inner
                stack += [n for m in inner for n in m]
            else:
                out.add(name)
        return sorted(out & set(self._known))

    def _forward(self) -> bool:
        """Work out derived lengths, and stated sizes, from what is known by now."""
        progress = False
        scope = ValueScope(self._known, self._lengths.extents)
        for name, derived in list(self._derived.items()):
            inner = substituted(derived.inner, self._known)
            if not set(inner) <= {()}:
                continue
            number = inner.get((), Fraction(0))
            value = _derived(derived, number, scope) if number.denominator == 1 else None
            if value is None:
                continue
            del self._derived[name]
            if name not in self._known:
                progress |= self.learn(name, Fraction(value), Origin())
            elif self._known[name] != value:
                self._off(name, derived, int(number), value)
        for name, stated in list(self._late.items()):
            try:
                value = evaluate(stated, scope)
            except CkptdError:
                continue
            del self._late[name]
            progress |= self.learn(name, Fraction(value), Origin(what=f"let {name} = ..."))
        return progress

    def _off(self, name: str, derived: Derived, inner: int, value: int) -> None:
        """Note that a padded or cut length is not what was observed."""
        what = "padded" if isinstance(derived, Padded) else "cut"
        names = self._atoms_of([name])
        sizes = " ".join(f"{n}={self._known[n]}" for n in names)
        message = f"{sizes}: {inner} {what} gives {value}, and {self._known[name]} was observed"
        self._tell(message, self.out.origins[name], names)

    def _joint(self) -> bool:
        """Solve for unknown products together, then for sizes from their ratios."""
        rows = [
            (substituted(c.polynomial, self._known), Fraction(c.total), frozenset([k]))
            for k, c in enumerate(self._open)
        ]
        products, wrong = linear(rows)
        for members in wrong:
            self._contradict(sorted(members))
        progress = False
        self.out.products = {m: value for m, (value, _) in products.items()}
        for monomial, (value, members) in products.items():
            if len(monomial) == 1:
                progress |= self.learn(monomial[0], value, self._origin(members))
        if progress:
            return True
        for name, value in ratios(self.out.products).items():
            progress |= self.learn(name, value, Origin(what="ratios of observed lengths"))
        return progress

    def _origin(self, members: Iterable[int]) -> Origin:
        """Return where something is from that several constraints together say."""
        first, *others = (self._open[k].origin for k in sorted(members))
        if not others:
            return first
        return replace(first, what=f"{first.what} and {others[0]}")

    def _contradict(self, members: Sequence[int]) -> None:
        first, *others = (self._open[k].origin for k in members)
        message = f"{first.what} contradicts what other rules lead to"
        notes = tuple(f"against {o}" for o in others[:4])
        finding = Finding("sizes", message, first.at, first.rule, notes, fit=True)
        if finding not in self.out.findings:
            self.out.findings.append(finding)

    def _bounds(self) -> None:
        """Say what padding leaves open."""
        scope = ValueScope(self._known, self._lengths.extents)
        for name, derived in self._derived.items():
            inner = substituted(derived.inner, self._known)
            names = list(inner)
            if not isinstance(derived, Padded) or name not in self._known or len(names) != 1:
                continue
            try:
                multiple = evaluate(derived.multiple, scope)
            except CkptdError:
                continue
            whole, factor = self._known[name], inner[names[0]]
            if multiple < 1 or whole % multiple:
                message = f"{whole} is not a multiple of {multiple}, to which this rule pads"
                self._tell(message, self.out.origins[name])
            elif len(names[0]) == 1 and factor.denominator == 1:
                low = (whole - multiple) // int(factor) + 1
                self.out.bounds[names[0][0]] = (max(low, 0), whole // int(factor))


def _derived(derived: Derived, inner: int | Fraction, scope: ValueScope) -> int | None:
    """Work out a derived length; None if it cannot be."""
    try:
        if isinstance(derived, Padded):
            return padded(int(inner), Pad(One(), derived.multiple), scope)
        start, stop = part(int(inner), derived.how, derived.extent, derived.coordinate, scope)
    except CkptdError:
        return None
    return stop - start


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"
