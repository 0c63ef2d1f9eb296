"""Screen of ``ckptd top``: lines, signs and order of ranks and incidents."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from ckptd.cli.output import shorten, time_text
from ckptd.cli.terminal import BAD, GOOD, PLAIN, WARN
from ckptd.errors import one_line, size_text

STATUSES = ("ok", "waiting", "suspect", "dead", "silent", "slow")
"""Order is the number in the column ``status`` of the API."""
_LOOKS = {
    "ok": ("●", GOOD),
    "waiting": ("◌", PLAIN),
    "suspect": ("▲", f"bold {WARN}"),
    "dead": ("✕", f"bold {BAD}"),
    "silent": ("?", "dim"),
    "slow": ("▬", WARN),
}
"""A letter and a colour each: neither alone has to be told from another."""

_WEIGHT = {"dead": 0, "suspect": 1, "slow": 2, "silent": 3, "waiting": 4, "ok": 5}
_STATE = {"ok": "healthy", "waiting": "waiting for ranks", "incident": "incident"}


def screen(
    job: dict[str, Any],
    ranks: dict[str, Any],
    incidents: list[dict[str, Any]],
    rows: int,
    lost: str = "",
    versions: dict[str, Any] | None = None,
) -> RenderableType:
    """Return what is drawn.

    Parameters
    ----------
    job, ranks, incidents
        Answers of the API: of ``/job`` and ``/ranks``, and open incidents, the newest first.
    rows
        Ranks to list at most.
    lost
        Since when nothing was heard; empty while the daemon answers.
    versions
        Of weights that are published, as ``/checkpoints`` has them; None: none are.
    """
    job, ranks, incidents = _shown(job), _shown(ranks), _shown(incidents)
    parts: list[RenderableType] = [_head(job, lost), _statuses(job, ranks)]
    if versions:
        parts.append(_versions(versions))
    if incidents:
        parts += [Text(), _incidents(incidents)]
    shown = Group(*parts[1:], Text(), _ranks(ranks, rows))
    return Group(parts[0], Styled(shown, "dim" if lost else ""))


def odd_rows(ranks: dict[str, Any], most: int) -> list[int]:
    """Return rows of ranks, the most telling first: dead, suspect, slow, silent, then the oldest.

    Parameters
    ----------
    ranks
        Columns of ``/ranks``.
    most
        Rows at most.
    """
    age = ranks["progress_age_s"]

    def weight(row: int) -> tuple[int, float, int]:
        return (_WEIGHT[STATUSES[ranks["status"][row]]], -(age[row] or 0.0), ranks["rank"][row])

    return sorted(range(len(ranks["rank"])), key=weight)[:most]


def _shown(value: Any) -> Any:
    """Return a document whose texts cannot act on the terminal: a daemon passes on what it got."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _head(job: dict[str, Any], lost: str) -> Text:
    state = job["state"]
    look = {"ok": GOOD, "incident": f"bold {WARN}"}.get(state, WARN)
    word = _STATE.get(state, state)
    if lost:  # how the job is now is not known
        word, look = f"connection lost since {lost}; it was: {word}", "bold reverse"
    text = Text.assemble((job["job"] or "no job", "bold"), "  ", (word, look))
    step = job["step"]
    if step:
        low, high = step["min"], step["max"]
        text.append(f"  step {high:,}" if low == high else f"  step {low:,} to {high:,}")
    text.append(f"  {job['ranks_reporting']:,} of {job['world']:,} ranks")
    agents = job["agents"]
    text.append(f"  agents {agents['up']:,} up")
    if agents["silent"]:
        text.append(f", {agents['silent']:,} silent", "bold")
    if job["goodput"]:
        text.append(f"  goodput {100 * job['goodput']['share']:.1f} %")
    return text


def _statuses(job: dict[str, Any], ranks: dict[str, Any]) -> Text:
    counts = Counter(STATUSES[s] for s in ranks["status"])
    text = Text()
    for name in STATUSES:
        if counts[name]:
            letter, look = _LOOKS[name]
            text.append(f"{letter} ", look).append(f"{name} {counts[name]:,}  ")
    phases = "  ".join(f"{name.lower()} {n:,}" for name, n in job["phases"].items() if n)
    return text.append(phases, "dim")


def _versions(versions: dict[str, Any]) -> Text:
    text = Text(f"weights of step {versions['step']:,}")
    workers, behind = versions["workers"], versions["behind"]
    text.append(f"  {workers:,} worker{'' if workers == 1 else 's'}")
    if behind:
        text.append(f", up to {behind:,} version{'' if behind == 1 else 's'} behind", WARN)
    if versions["whole"]:
        sent, whole = size_text(versions["received"]), size_text(versions["whole"])
        text.append(f"  {sent} of {whole} sent")
    if versions["mapped"]:
        text.append(f"  {size_text(versions['mapped'])} read on the host")
    return text


def _incidents(incidents: list[dict[str, Any]]) -> Text:
    text = Text()
    for one in incidents:
        text.append("▲ ", f"bold {WARN}").append(shorten(one["headline"], 300)).append("\n")
        opened = time_text(one["opened_at"])[-8:]
        under = f"  {shorten(one['id'], 40)}, {one['verdict']['kind']}, opened {opened}\n"
        text.append(under, "dim")
    text.rstrip()
    return text


def _ranks(ranks: dict[str, Any], rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    table.add_column("RANK", justify="right", no_wrap=True)
    # Columns that may wrap are the first to shrink: of a narrow terminal, names of nodes get less.
    table.add_column("NODE")
    table.add_column("PID", justify="right", no_wrap=True)
    table.add_column("STATUS", no_wrap=True)
    for name in ("STEP", "MOVED", "SELF", "SCORE"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("IN CALL", ratio=1, overflow="ellipsis", no_wrap=True)
    for row in odd_rows(ranks, rows):
        name = STATUSES[ranks["status"][row]]
        letter, look = _LOOKS[name]
        score, step = ranks["score"][row], ranks["step"][row]
        table.add_row(
            str(ranks["rank"][row]),
            Text(
                shorten(ranks["nodes"][ranks["node"][row]], 24), no_wrap=True, overflow="ellipsis"
            ),
            str(ranks["pid"][row] or "-"),
            Text(f"{letter} {name}", look),
            f"{step:,}" if step >= 0 else "-",
            _seconds(ranks["progress_age_s"][row]),
            _seconds(ranks["self_s"][row]),
            "-" if score is None else f"{score:.2f}",
            Text(shorten(ranks["pending"][row] or "", 100)),
        )
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else f"{value / 60:.0f} min"
