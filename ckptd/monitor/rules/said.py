"""Failures in logs: classes by patterns of lines of ranks and the kernel (CUDA errors, OOM ...).

In it: the table ``said.tsv``; which line counts, clocks and ranks in lines; how many lines are read
and shown.

Rules alone: each class is a pattern and what to do next. A line that only follows from another
failure (a peer is gone, a call timed out) counts where no line shows a cause. Classes are those of
the published taxonomies of NVRx (numbers of its categories) and ByteRobust (its symptoms).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

KERNEL = "kernel"
"""Source of the kernel's lines."""
FLIGHT = "flight recorder"
"""Before each line that a rank's flight recorder shows."""
_MOST_LINES = 20_000
_MOST_SHOWN = 40
_BESIDE = 3
_LONGEST = 2000
"""Letters of a line; of a longer one the middle is left out: patterns take their time with it."""


class SaidClass(NamedTuple):
    """A class of failures, by what is said of it.

    Attributes
    ----------
    name
        In a few words.
    pattern
        Of a line that shows it.
    action
        What to do next.
    nvrx, symptom
        Categories of NVRx, and the symptom of ByteRobust; empty for none.
    follows
        Whether another failure is its usual cause.
    """

    name: str
    pattern: re.Pattern[str]
    action: str
    nvrx: str = ""
    symptom: str = ""
    follows: bool = False


@cache
def classes() -> tuple[SaidClass, ...]:
    """Return those of the table beside this module, those that are looked for first first.

    Not as this is imported: patterns take 4 ms, and most processes never hear of a failure.
    """
    table = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    return tuple(
        SaidClass(name, re.compile(fits, re.IGNORECASE), action, nvrx, symptom, bool(follows))
        for name, follows, nvrx, symptom, action, fits in (row.split("\t") for row in table[1:])
    )


_ERROR = SaidClass(
    "program", re.compile("$^"), "mend the program: it ends so again", "28", "User code error"
)
"""An error of Python that is in no other class."""
_OF_ALL = frozenset({"calls differ", "not all came", "taken away", "port taken"})
"""Of these a rank tells that it has noticed, and not that it is the cause."""

_PREFIX = re.compile(
    r"\[?rank ?(\d{1,7})\]?: ?|.{0,32}?\[\d{1,9},(\d{1,7})\]<std...>: ?|"
    r"(?:\[?(?:default|local_rank) ?|\[(?=\d+\]))(?P<local>\d{1,7})\]?: ?",
    re.IGNORECASE,
)
_RANK = re.compile(
    r"\bRank (\d{1,7})\]|local_rank: (?P<local>\d{1,7})|\brank\s{0,20}:\s{0,20}(\d{1,7})",
    re.IGNORECASE,
)
_TOGETHER = re.compile(r"printed by (ranks [\d, ]+):")
_NAMED = re.compile(
    r"Ranks? (\d{1,7}) failed to|exitcode: \S{1,20}\) local_rank: (?P<local>\d{1,7})"
)
_FRAME = re.compile(r'  File ".{0,500}", line \d{1,9}, in ')
"""Of a traceback whose head is cut off."""
_PID = re.compile(r"(?:[Kk]illed process |pid=|PID )(\d{1,9})")
_CLOCKS = (
    re.compile(
        r"(?:\[|^)[A-Z](?P<month>\d\d?)(?P<day>\d\d) (?P<time>\d\d:\d\d:\d\d)(?P<part>\.\d+)?"
    ),
    re.compile(
        r"\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[ T](?P<time>\d\d:\d\d:\d\d)(?P<part>[.,]\d+)?"
    ),
    re.compile(r"(?:\w{3} )?(?P<name>[A-Z][a-z]{2}) +(?P<day>\d\d?) (?P<time>\d\d:\d\d:\d\d)"),
)
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Failed)?(?::|$)")


class SaidLine(NamedTuple):
    """A line; `at` are seconds of the year by its own time or the one before it, if any."""

    at: float | None
    source: str
    rank: int | None
    text: str
    kind: SaidClass | None


class Said(NamedTuple):
    """The class, ranks and place that lines show.

    Attributes
    ----------
    kind
        The class of the first abnormal line.
    ranks
        Ranks that it is about; empty where it names none.
    first
        Its place among `lines`.
    lines
        All lines, joined by time.
    """

    kind: SaidClass
    ranks: tuple[int, ...]
    first: int
    lines: tuple[SaidLine, ...]

    def view(self) -> str:
        """Return the abnormal lines and those beside the first, which is marked, as text."""
        near = range(max(self.first - _BESIDE, 0), self.first + _BESIDE + 1)
        shown = [n for n, line in enumerate(self.lines) if line.kind is not None or n in near]
        at = shown.index(self.first)
        begin = max(min(at - _MOST_SHOWN // 2, len(shown) - _MOST_SHOWN), 0)
        return "\n".join(self._row(n) for n in shown[begin : begin + _MOST_SHOWN])

    def _row(self, number: int) -> str:
        line = self.lines[number]
        seconds = None if line.at is None else line.at % 86400
        clock = " " * 8
        if seconds is not None:
            clock = f"{seconds // 3600:02.0f}:{seconds // 60 % 60:02.0f}:{int(seconds % 60):02d}"
        mark = ">" if number == self.first else " "
        shared = line.source.startswith("ranks ") and line.rank is not None
        return f"{mark} {clock} {f'rank {line.rank}' if shared else line.source}: {line.text}"


def said(texts: Mapping[str, str], pids: Mapping[int, int] | None = None) -> Said | None:
    """Return what the first abnormal line shows; None where no line is abnormal.

    Parameters
    ----------
    texts
        Output by its source: ``rank N``, ``ranks N, M`` of one file, a node, or `KERNEL`.
    pids
        Ranks by process, for lines that name one.
    """
    lines = [line for source, text in texts.items() for line in _lines(source, text, pids or {})]
    # Lines without any time stay behind those that have one, in the order of the sources.
    lines.sort(key=lambda line: (line.at is None, line.at or 0.0))
    abnormal = [n for n, line in enumerate(lines) if line.kind is not None]
    causes = [n for n in abnormal if not _of(lines, n).follows]
    if not abnormal:
        return None
    # The kernel and a class of its own say more than an error of Python, and that than an end.
    alone = len({_of(lines, n).name for n in abnormal}) == 1
    first = min(causes or abnormal, key=lambda n: (_weight(lines[n], alone=alone), n))
    kind = _of(lines, first)
    if kind.follows:
        ranks = _quiet(texts, lines, abnormal)
    elif kind.name in _OF_ALL:
        ranks = ()
    else:
        ranks = tuple(r for r in [lines[first].rank] if r is not None)
        same = {line.rank for line in lines if line.kind is kind and line.at == lines[first].at}
        if lines[first].at is None and not ranks:
            ranks = tuple(sorted(r for r in same if r is not None))
    return Said(kind, ranks, first, tuple(lines))


def together(ranks: Collection[int]) -> str:
    """Return the line before what several ranks print to one file; of one rank, nothing."""
    return f"printed by ranks {', '.join(map(str, sorted(ranks)))}:\n" if len(ranks) > 1 else ""


def process_of(text: str) -> int | None:
    """Return the process that a line names, if any."""
    found = _PID.search(text)
    return int(found[1]) if found else None


def said_of(logs: Mapping[int, str]) -> str:
    """Return what the output of ranks shows, as text: class, ranks, what to do, lines by time."""
    texts: dict[str, str] = {}
    pids: dict[int, int] = {}
    for rank, log in logs.items():
        source, own = f"rank {rank}", defaultdict[str, list[str]](list)
        for line in log.splitlines():
            if of := _TOGETHER.fullmatch(line):
                source = of[1]
            elif line.startswith(f"{FLIGHT}: "):
                own[f"{FLIGHT} of rank {rank}"].append(line[len(FLIGHT) + 2 :])
            elif line.startswith(f"{KERNEL}: "):
                own[KERNEL].append(line[8:])
                pids |= {pid: rank for pid in [process_of(line)] if pid is not None}
            else:
                own[source].append(line)
        texts[f"rank {rank}"] = "\n".join(own.pop(f"rank {rank}", ()))
        texts[KERNEL] = "\n".join([texts.get(KERNEL, ""), *own.pop(KERNEL, ())]).strip()
        for source, lines in own.items():  # the others that print there have the same
            texts[source] = max(texts.get(source, ""), "\n".join(lines), key=len)
    found = said(texts, pids)
    if found is None:
        return ""
    who = "".join(f", rank {rank}" for rank in found.ranks)
    return f"{found.kind.name}{who}; next: {found.kind.action}\n{found.view()}"


def _of(lines: list[SaidLine], number: int) -> SaidClass:
    kind = lines[number].kind
    return _ERROR if kind is None else kind


def _weight(line: SaidLine, *, alone: bool) -> int:
    if line.kind is not None and line.kind.name == "killed":
        return 2 if alone else 3
    if line.source == KERNEL:
        return 0
    return 2 if line.kind is _ERROR else 1


def _quiet(texts: Mapping[str, str], lines: list[SaidLine], abnormal: list[int]) -> tuple[int, ...]:
    """Return ranks that complain of nothing, where most of the others do: they are waited for."""
    every = {line.rank for line in lines if line.rank is not None}
    every |= {rank for name in texts for rank in _own(name)}
    loud = {lines[n].rank for n in abnormal}
    if any(lines[n].rank is None and lines[n].source.startswith("ranks ") for n in abnormal):
        return ()  # one of several has said it
    quiet = sorted(every - loud)
    return tuple(quiet) if 2 * len(quiet) < len(every) else ()


def _own(source: str) -> list[int]:
    """Return the ranks that print into a source."""
    found = re.fullmatch(rf"(?:{FLIGHT} of )?ranks? ([\d, ]+)", source)
    return [int(number) for number in re.findall(r"\d{1,7}", found[1])] if found else []


def _lines(source: str, text: str, pids: Mapping[int, int]) -> Iterator[SaidLine]:
    own = _own(source)
    mine = own[0] if len(own) == 1 else None
    at: float | None = None
    begun, waiting = False, list[SaidLine]()
    traced: set[int | None] = set()
    for raw in text.splitlines()[-_MOST_LINES:]:
        clock = _clock(raw)
        at = at if clock is None else clock
        rank, shown = mine, raw.rstrip()
        if len(shown) > _LONGEST:
            shown = f"{shown[: _LONGEST // 2]} ... {shown[-_LONGEST // 2 :]}"
        while prefix := _PREFIX.match(shown):  # of a launcher, and of PyTorch within
            rank = _number(prefix, rank, own)
            shown = shown[prefix.end() :]
        kind = None if shown.startswith("ckptd: ") else class_of(shown)  # not our own console
        if shown.startswith("Traceback (most recent call last)") or _FRAME.match(shown):
            traced.add(rank)
            kind = None  # the program's text
        elif rank in traced and shown.startswith((" ", "\t")):
            kind = None
        elif rank in traced and shown:
            traced.discard(rank)
            if kind is None and _EXCEPTION.match(shown):
                kind = _ERROR
        rank = rank if kind is None else _rank(shown, rank, own, pids)
        line = SaidLine(at, source, rank, shown, kind)
        if at is None and not begun:
            waiting.append(line)  # it takes the time of the first line that has one
            continue
        begun = True
        yield from (one._replace(at=at) for one in waiting)
        waiting.clear()
        yield line
    yield from waiting


def class_of(text: str) -> SaidClass | None:
    """Return the class that a line shows by itself, if any."""
    return next((kind for kind in classes() if kind.pattern.search(text)), None)


def _rank(text: str, rank: int | None, own: list[int], pids: Mapping[int, int]) -> int | None:
    """Return the rank that a line is about: one that it names, else the one that says it."""
    if (named := _NAMED.search(text)) or (rank is None and (named := _RANK.search(text))):
        return _number(named, rank, own)
    process = process_of(text)
    return rank if process is None else pids.get(process, rank)


def _number(found: re.Match[str], rank: int | None, own: list[int]) -> int | None:
    """Return the rank that a pattern has found; `rank` for a number that counts within a node.

    Such a number is the rank's where that is among those that print there, or where none is known.
    """
    number = int(found[found.lastindex or 1])
    return rank if found["local"] is not None and own and number not in own else number


def _clock(text: str) -> float | None:
    for pattern in _CLOCKS:
        if found := pattern.search(text, 0, 80):
            parts = found.groupdict()
            name = parts.get("name")
            month = _MONTHS.find(name) // 3 + 1 if name else int(parts["month"])
            if not 1 <= month <= 12:
                continue
            hour, minute, second = map(int, parts["time"].split(":"))
            try:
                moment = datetime(2000, month, int(parts["day"]), hour, minute, second, tzinfo=UTC)
            except ValueError:
                continue
            part = float("0." + parts["part"][1:]) if parts.get("part") else 0.0
            return (moment - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() + part
    return None
