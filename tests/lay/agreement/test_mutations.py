"""A mistake in the program of a reader never goes by in silence.

Single changes of the ten programs of ``programs/``, in one layout of each pair at a time. What
becomes of each is told by `mutations_judge`; one that means something else and is not found is a
failure.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ckptd.lay.syntax import parse
from ckptd.lay.syntax.tree import File, Layout, Reshard
from tests.lay.agreement.mutations import KINDS, Mutant, mutants
from tests.lay.agreement.mutations_judge import Reader

PROGRAMS = sorted((Path(__file__).parents[1] / "programs").glob("*.lay"))
SIZES = {
    "01": {"v": 300, "h": 10, "l": 4, "kv": 4, "rep": 2, "two": 2, "half": 2, "f": 12},
    "02": {"v": 70, "h": 33, "l": 2, "kv": 4, "rep": 2, "two": 2, "half": 3, "f": 34},
    "03": {"l": 2, "e": 8, "f": 12, "h": 20},
    "04": {"v": 101, "h": 12, "l": 4, "kv": 4, "rep": 2, "two": 2, "half": 3, "f": 22},
    "05": {"v": 101, "h": 12, "l": 2, "kv": 3, "rep": 2, "two": 2, "half": 3, "f": 24},
    "06": {"v": 130, "h": 10, "l": 2, "kv": 4, "rep": 4, "two": 2, "half": 2, "f": 16},
    "07": {"v": 130, "h": 10, "l": 2, "kv": 2, "rep": 2, "two": 2, "half": 4, "f": 16},
    "08": {"v": 11, "h": 6, "l": 2, "kv": 2, "rep": 2, "two": 2, "half": 2, "f": 512},
    "09": {"v": 40, "h": 10, "l": 3, "kv": 2, "rep": 2, "two": 2, "half": 2, "f": 13},
    "10": {"v": 200, "h": 6, "l": 61, "kv": 4, "rep": 2, "hd": 2, "f": 6, "r": 2},
}
"""Some tensors have more elements than a witness has values of one tensor."""

Report = Callable[[str], None]


def readers() -> Iterator[tuple[Path, File, Reader]]:
    """Yield each layout of each program, read into the plainest other one of its program."""
    for path in PROGRAMS:
        file = parse(path.read_text(), path.name)
        names = [i.name for i in file.items if isinstance(i, Layout)]
        (pair,) = [(i.source, i.target) for i in file.items if isinstance(i, Reshard)]
        for layout, other in (pair, pair[::-1]):
            target = "hf" if "hf" in names and layout != "hf" else other
            yield path, file, Reader(file, layout, target, SIZES[path.name[:2]])


def campaign(
    chosen: Callable[[str, list[Mutant]], Iterable[Mutant]],
    report: Report,
    judged: Iterable[tuple[Path, File, Reader]],
) -> None:
    """Judge mutants of all programs; `chosen` says which."""
    total: Counter[str] = Counter()
    by_kind: Counter[tuple[str, str]] = Counter()
    survivors: list[str] = []
    for path, file, reader in judged:
        assert reader.outcome(file)[0] == "equal", f"{path.name} {reader.layout} is not read right"
        for mutant in chosen(path.name[:2], list(mutants(file, reader.layout))):
            outcome, _ = reader.outcome(mutant.file)
            total[outcome] += 1
            by_kind[mutant.kind, outcome] += 1
            if outcome == "survivor":
                survivors.append(f"{path.name}, layout {reader.layout}, {mutant}")
    words = {
        "check": "wrong by themselves",
        "fit": "do not fit what the ranks hold",
        "plan": "no plan",
        "witness": "found by the witness",
        "equal": "mean the same",
        "survivor": "go by in silence",
    }
    shown = ", ".join(f"{total[o]} {text}" for o, text in words.items())
    report(f"{total.total()} mutants of {len(PROGRAMS)} programs: {shown}")
    for kind in KINDS:
        found = {o: by_kind[kind, o] for o in words if by_kind[kind, o]}
        if found:
            report(f"  {kind}: " + ", ".join(f"{n} {words[o]}" for o, n in found.items()))
    for line in survivors:
        report(f"  SURVIVOR {line}")
    assert not survivors, "\n".join(survivors)
    assert total["check"]
    assert total["fit"]
    assert total["witness"]


@pytest.mark.slow
def test_mutations(report: Report) -> None:
    """A few of each program, in one of its two layouts; the same each time."""
    rng = random.Random(4)
    both = list(readers())
    one = [both[2 * n + n % 2] for n in range(len(PROGRAMS))]

    def few(program: str, found: list[Mutant]) -> list[Mutant]:
        return rng.sample(found, min(len(found), 1 if program == "10" else 3))

    campaign(few, report, one)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_mutations(report: Report) -> None:
    campaign(lambda _, found: found, report, readers())


def test_each_kind_occurs() -> None:
    found = {m.kind for _, file, reader in readers() for m in mutants(file, reader.layout)}
    assert found == set(KINDS)
