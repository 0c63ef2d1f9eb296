"""Sheets from views, one sheet from many, and the columns of a job from all sheets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from ckptd.monitor.job import NO_EXIT, RANK, AgentView, JobView, RankView
from ckptd.monitor.report import SHEET_RANK, STATES, TABLES, AgentState, GroupInfo, NodeReport
from ckptd.monitor.ring import RecorderState
from ckptd.monitor.stats import Array

__all__ = ["RankNote", "ended_on_purpose", "from_views", "gathered", "job_of", "merge", "selected"]

_LONGEST_S = 9e8
_COUNT = 1 << 62


class RankNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rank beside its view; see `ckptd.monitor.report.SHEET_RANK`."""

    generation: int = 0
    lived: float = float("nan")
    recorder: RecorderState = RecorderState.CALLS
    lost: int = 0
    written: int = 0


def from_views(
    views: Sequence[RankView],
    *,
    job: str,
    source: str,
    number: int,
    notes: Mapping[int, RankNote] | None = None,
    agents: Mapping[str, AgentState] | None = None,
    members: Mapping[int, GroupInfo] | None = None,
    texts: Mapping[int, str] | None = None,
    after: int = 0,
    **tables: Array,
) -> NodeReport:
    """Return the sheet of `views`, one view a rank.

    What a damaged ring makes a view say is brought within bounds, so that the sheet as a whole
    can be taken.

    Parameters
    ----------
    views
        Of the ranks of a node, or of several.
    job, source, number
        Head of the sheet.
    notes
        By rank.
    agents
        By name of node. A node without ranks is told if it is here.
    members, texts
        To be told this time; members default to those of the views.
    after
        As of `NodeReport`.
    **tables
        Rows of ``gaps``, ``steps``, ``sums`` and ``collectives``.
    """
    agents, notes = agents or {}, notes or {}
    nodes = tuple(dict.fromkeys([*(v.node for v in views), *agents]))
    place = {node: i for i, node in enumerate(nodes)}
    plain = RankNote()
    ranks = [_row(v, place[v.node], notes.get(v.rank, plain)) for v in views]
    if members is None:
        told = {g: r for v in views for g, r in v.members.items()}
        members = {g: GroupInfo.of(r) for g, r in told.items()}
    sheet = NodeReport(
        job=job,
        source=source,
        number=number,
        nodes=nodes,
        agents=tuple(agents.get(node, AgentState()) for node in nodes),
        ranks=np.array(ranks, SHEET_RANK).tobytes(),
        groups=_joined([v.groups for v in views], "groups").tobytes(),
        calls=_calls(views).tobytes(),
        members=dict(members),
        texts=dict(texts or {}),
        after=after,
    )
    packed = {n: t.astype(TABLES[n], copy=False).tobytes() for n, t in tables.items()}
    return msgspec.structs.replace(sheet, **packed)


def _row(v: RankView, node: int, note: RankNote) -> tuple[object, ...]:
    inside = v.pending_group != 0
    return (
        v.rank,
        node,
        v.alive,
        NO_EXIT if v.exit_code is None else v.exit_code,
        v.process_state.encode() if v.process_state.encode() in STATES else b"",
        -1 if v.answers is None else v.answers,
        _age(v.at - v.heartbeat),
        np.nan_to_num(_age(v.at - v.moved), nan=0.0),
        v.phase,
        v.step,
        v.steps_done,
        v.pending_group,
        v.pending_seq,
        np.nan_to_num(_age(v.at - v.pending_since)) if inside else np.nan,
        v.world,
        v.pid,
        note.generation,
        _age(note.lived),
        note.recorder,
        note.lost,
        note.written,
    )


def _age(seconds: float) -> float:
    # A stamp may be newer than the moment at which the view was begun.
    return min(max(seconds, 0.0), _LONGEST_S) if seconds == seconds else seconds


def _joined(tables: Sequence[Array], name: str) -> Array:
    dtype = TABLES[name]
    sizes = [len(table) for table in tables]
    out = np.zeros(sum(sizes), dtype)
    if len(out):
        out["row"] = np.repeat(np.arange(len(tables)), sizes)
        whole = np.concatenate(tables)
        for field in whole.dtype.names or ():
            out[field] = whole[field]
    if name == "groups":
        out = out[out["group"] != 0]
        for field in ("entered", "completed"):
            out[field] = np.clip(out[field], 0, _COUNT)
    return out


def _calls(views: Sequence[RankView]) -> Array:
    out = _joined([v.calls for v in views], "calls")
    at = np.array([v.at for v in views])[out["row"]]
    out["start"] = -np.clip(at - out["start"], 0, _LONGEST_S)
    out["end"] = np.maximum(-np.clip(at - out["end"], 0, _LONGEST_S), out["start"])
    for field, low, high in (("seq", 0, _COUNT), ("bytes", -1, _COUNT), ("root", -1, 1 << 30)):
        out[field] = np.clip(out[field], low, high)
    out["step"] = np.clip(out["step"], -1, _COUNT)
    return out


# --- many into one ------------------------------------------------------------------------------


def merge(
    sheets: Sequence[NodeReport],
    ages: Sequence[float],
    *,
    job: str,
    source: str,
    number: int,
    members: Mapping[int, GroupInfo] | None = None,
    texts: Mapping[int, str] | None = None,
    collectives: Array | None = None,
    after: int = 0,
) -> NodeReport:
    """Return one sheet with everything of `sheets`: what a forwarder passes on.

    Parameters
    ----------
    sheets
        The newest of each source. Gaps, steps and sums of those that were passed on before must
        have been taken out.
    ages
        Seconds since each arrived; added to the age of its agents.
    job, source, number
        Head of the sheet.
    members, texts
        To be told this time; those of the sheets if left out.
    collectives, after
        What all sheets so far add up to, as of `ckptd.monitor.collectives.Outbox`: increments of
        several sources, which begin at different moments, are not added here.
    """
    nodes: dict[str, AgentState] = {}
    for sheet, age in zip(sheets, ages, strict=True):
        for node, agent in zip(sheet.nodes, sheet.agents, strict=True):
            nodes[node] = msgspec.structs.replace(agent, age_s=agent.age_s + age)
    names = tuple(nodes)
    if members is None:
        members = {g: info for sheet in sheets for g, info in sheet.members.items()}
    if texts is None:
        texts = {h: text for sheet in sheets for h, text in sheet.texts.items()}
    sheet = NodeReport(
        job=job,
        source=source,
        number=number,
        nodes=names,
        agents=tuple(nodes.values()),
        members=dict(members),
        texts=dict(texts),
        after=after,
    )
    stacked = (name for name in TABLES if name != "collectives")
    tables = {name: _stacked(sheets, name, names).tobytes() for name in stacked}
    tables["collectives"] = b"" if collectives is None else collectives.tobytes()
    return msgspec.structs.replace(sheet, **tables)


def _stacked(sheets: Sequence[NodeReport], name: str, nodes: Sequence[str]) -> Array:
    """Return all rows of one table, with rows and nodes numbered anew.

    Bytes are put together, and not tables: numpy copies tables column by column.
    """
    out = np.frombuffer(b"".join([getattr(s, name) for s in sheets]), TABLES[name]).copy()
    counts = [len(getattr(s, name)) // TABLES[name].itemsize for s in sheets]
    if name == "ranks":
        place = {node: i for i, node in enumerate(nodes)}
        offset = np.cumsum([0, *(len(s.nodes) for s in sheets)])[:-1]
        table = np.array([place[node] for s in sheets for node in s.nodes], np.int32)
        if len(out):
            out["node"] = table[out["node"] + np.repeat(offset, counts)]
    elif "row" in (out.dtype.names or ()):
        ranks = [len(s.ranks) // SHEET_RANK.itemsize for s in sheets]
        out["row"] += np.repeat(np.cumsum([0, *ranks])[:-1], counts)
    return out


def job_of(
    sheets: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
    silent: Collection[str] = (),
) -> JobView:
    """Return the columns of the job that `sheets` show; see `gathered`."""
    return gathered(sheets, members, agents, silent)[0]


def gathered(
    sheets: Sequence[NodeReport],
    members: Mapping[int, Sequence[int]],
    agents: Sequence[AgentView] = (),
    silent: Collection[str] = (),
    fenced: int = 0,
) -> tuple[JobView, Array]:
    """Return the columns of the job that `sheets` show, one row a rank, and its `SHEET_RANK` rows.

    Of a rank that several sheets tell, the process that runs counts, then the newer generation,
    then the younger process. Dead processes of earlier generations are left out.

    Ages are those of the sheets' moments: what a rank did since its sheet is not known, and
    ageing it with the sheet would make a pause of an agent a hang of its ranks.

    Parameters
    ----------
    sheets
        The newest of each source.
    members
        Global ranks of groups, where told.
    agents
        Agents of which something is to be said.
    silent
        Nodes whose rows do not count: their forwarder has not heard of them for long.
    fenced
        Ranks of a generation from 1 to before this one do not count: they end on purpose.
    """
    nodes = tuple(dict.fromkeys(node for s in sheets for node in s.nodes))
    ranks = _stacked(sheets, "ranks", nodes)
    groups, calls = _stacked(sheets, "groups", nodes), _stacked(sheets, "calls", nodes)
    kept = _living(ranks) & ~ended_on_purpose(ranks, fenced)
    if silent:
        kept &= ~np.isin(ranks["node"], [i for i, node in enumerate(nodes) if node in silent])
    if not kept.all():
        ranks, groups, calls = ranks[kept], _of(groups, kept), _of(calls, kept)
    columns = np.zeros(len(ranks), RANK)
    for name in RANK.names or ():
        columns[name] = ranks[name]
    world = int(ranks["world"].max()) if len(ranks) else 0
    return JobView(world, nodes, columns, groups, calls, members, tuple(agents)), ranks


def ended_on_purpose(ranks: Array, fenced: int) -> Array:
    """Return which rows are of a life that a controller ends; one without a number is none."""
    generation = ranks["generation"]
    out: Array = (generation > 0) & (generation < fenced)
    return out


def selected(job: JobView, kept: Array) -> JobView:
    """Return `job` with those rows of ranks only that `kept` says."""
    groups, calls = _of(job.groups, kept), _of(job.calls, kept)
    return replace(job, ranks=job.ranks[kept], groups=groups, calls=calls)


def _living(ranks: Array) -> Array:
    """Return which rows stand for their rank."""
    newest = int(ranks["generation"].max()) if len(ranks) else 0
    kept: Array = (ranks["alive"] != 0) | (ranks["generation"] == newest)
    if len(np.unique(ranks["rank"])) < len(ranks):
        order = np.lexsort(
            (-ranks["lived"], ranks["generation"], ranks["alive"], kept, ranks["rank"])
        )
        last = np.append(ranks["rank"][order][1:] != ranks["rank"][order][:-1], True)
        chosen = np.zeros(len(ranks), bool)
        chosen[order[last]] = True
        kept &= chosen
    return kept


def _of(table: Array, kept: Array) -> Array:
    number = np.cumsum(kept) - 1
    out: Array = table[kept[table["row"]]]
    out["row"] = number[out["row"]]
    return out
