"""What every message must fulfil before anybody uses it, whoever sent it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ckptd.errors import CorruptError
from ckptd.monitor.collectives import SIZES, WORD
from ckptd.monitor.messages import TABLES, VERSION, Found, Orders, Sheet, SheetLimits
from ckptd.monitor.stats import Array
from ckptd.monitor.view import Phase

__all__ = ["STATES", "bad", "check_found", "check_orders", "check_sheet"]

_LONGEST_S = 1e9
"""Ages above 30 years are nonsense."""
_COUNT = 1 << 62
STATES = frozenset([b"", *(bytes([letter]) for letter in b"RSDTtZXxKWPI")])
"""Letters of the kernel for the state of a process."""
_RECORDER_STATES = 4


def bad(wanted: str, found: object) -> CorruptError:
    """Return the error of a message that is not what it should be."""
    return CorruptError(
        "this is not a message of the monitor",
        kind="bad-sheet",
        wanted=wanted,
        found=str(found)[:200],
    )


def check_sheet(sheet: Sheet, limits: SheetLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `sheet` is usable."""
    _check_head(sheet, limits)
    _check_nodes(sheet, limits)
    for name, dtype in TABLES.items():
        size, most = len(getattr(sheet, name)), getattr(limits, name, limits.rows)
        _need(size % dtype.itemsize == 0, f"whole rows of {name}", size)
        _need(size <= most * dtype.itemsize, f"at most {most} rows of {name}", size)
    ranks = sheet.table("ranks")
    _check_ranks(ranks, len(sheet.nodes), limits)
    for name, ordered in (("groups", True), ("calls", True), ("steps", False), ("sums", False)):
        rows = sheet.table(name)["row"]
        _within(rows, 0, len(ranks) - 1, f"row of {name}")
        if ordered:
            _need(bool((rows[1:] >= rows[:-1]).all()), f"{name} in the order of ranks", "not")
    _check_calls(sheet)
    _check_told(sheet)
    _check_collectives(sheet)
    _check_members(sheet, limits)


def _check_head(message: Sheet | Found, limits: SheetLimits) -> None:
    _need(message.version == VERSION, f"version {VERSION}", message.version)
    for name, text in (("job", message.job), ("source", message.source)):
        _need(0 < len(text) <= limits.name, f"a {name} of 1 to {limits.name} characters", len(text))
    _need(0 <= message.number < _COUNT, "a number", message.number)


def _check_nodes(sheet: Sheet, limits: SheetLimits) -> None:
    nodes, agents = sheet.nodes, sheet.agents
    _need(len(nodes) <= limits.nodes, f"at most {limits.nodes} nodes", len(nodes))
    _need(len(agents) == len(nodes), "an agent for each node", len(agents))
    _need(len(set(nodes)) == len(nodes), "different names of nodes", "the same")
    _names(nodes, limits.name, "name of a node")
    for agent in agents:
        _need(len(agent.address) <= limits.name, "a short address", len(agent.address))
        _need(0 <= agent.cpu_s < _LONGEST_S, "CPU seconds", agent.cpu_s)
        _need(0 <= agent.recorder_s < _COUNT, "seconds", agent.recorder_s)
        _need(0 <= agent.age_s < _LONGEST_S, "an age", agent.age_s)
        least = min(agent.overruns, agent.rings, agent.bad_rings)
        _need(least >= 0, "counts", least)
        most = max(agent.overruns, agent.rings, agent.bad_rings)
        _need(most < _COUNT, "counts", most)


def _check_ranks(ranks: Array, nodes: int, limits: SheetLimits) -> None:
    _within(ranks["world"], 1, limits.world, "world")
    _need(bool((ranks["rank"] >= 0).all()), "ranks from 0", "less")
    _need(bool((ranks["rank"] < ranks["world"]).all()), "ranks below the world", "more")
    for name, low, high in (
        ("node", 0, nodes - 1),
        ("alive", 0, 1),
        ("answers", -1, 1),
        ("phase", 0, max(Phase)),
        ("step", -1, _COUNT),
        ("steps_done", 0, _COUNT),
        ("pending_seq", 0, _COUNT),
        ("pid", 0, 1 << 32),
        ("generation", 0, 1 << 32),
        ("recorder", 0, _RECORDER_STATES - 1),
        ("lost", 0, _COUNT),
        ("written", 0, _COUNT),
    ):
        _within(ranks[name], low, high, name)
    _need(
        bool(np.isin(ranks["state"], list(STATES)).all()), "states of processes", "another letter"
    )
    _ages(ranks["idle"], "idle", known=True)
    for name in ("heartbeat", "pending_age", "lived"):
        _ages(ranks[name], name)
    inside = ranks["pending_group"] != 0
    _need(not np.isnan(ranks["pending_age"][inside]).any(), "an age of each pending call", "NaN")


def _check_calls(sheet: Sheet) -> None:
    groups, calls = sheet.table("groups"), sheet.table("calls")
    for name in ("entered", "completed"):
        _within(groups[name], 0, _COUNT, name)
    _need(bool((groups["group"] != 0).all()), "groups other than 0", "0")
    for name, low, high in (
        ("seq", 0, _COUNT),
        ("bytes", -1, _COUNT),
        ("root", -1, 1 << 30),
        ("step", -1, _COUNT),
        ("phase", 0, max(Phase)),
    ):
        _within(calls[name], low, high, name)
    _ages(-calls["start"], "start of a call", known=True)
    _ages(-calls["end"], "end of a call")
    _need(not (calls["end"] < calls["start"]).any(), "calls that end after they start", "before")


def _check_told(sheet: Sheet) -> None:
    gaps, steps, sums = (sheet.table(name) for name in ("gaps", "steps", "sums"))
    _within(gaps["phase"], 0, max(Phase), "phase")
    _ages(gaps["seconds"], "gap", known=True)
    _within(steps["step"], 0, _COUNT, "step")
    _within(steps["phase"], 0, max(Phase), "phase")
    for name in ("self_s", "inside_s", "wall_s"):
        _ages(steps[name], name)
    _within(sums["step"], -1, _COUNT, "step")
    _within(sums["what"], 0, 1, "what")


def _check_collectives(sheet: Sheet) -> None:
    rows = sheet.table("collectives")
    _need(0 <= sheet.after < max(sheet.number, 1), "the number of an earlier sheet", sheet.after)
    _need(bool((rows["op"] != b"").all()), "an operation", "none")
    for text in {*rows["op"].tolist(), *rows["kind"].tolist()}:
        _need(WORD.fullmatch(text) is not None, "the word for a label", repr(text))
    _within(rows["size"], 0, len(SIZES), "size")
    values = rows["values"]
    _need(bool(((values >= 0) & (values < _COUNT)).all()), "increments", "negative or endless")


def _check_members(sheet: Sheet, limits: SheetLimits) -> None:
    _need(len(sheet.members) <= limits.members, f"at most {limits.members} groups", "more")
    listed = 0
    for ident, info in sheet.members.items():
        _need(0 < ident < 1 << 64, "the hash of a group", ident)
        _names((info.name, info.kind), limits.name, "name of a group", least=0)
        _need(0 <= info.size <= limits.world, "a size", info.size)
        ends = (info.first, info.first + max(info.size - 1, 0) * info.stride)
        _need(min(ends) >= 0 and max(ends) < limits.world, "global ranks", ends)
        _need(len(info.listed) in (0, 4 * info.size), "a rank for each member", len(info.listed))
        _need(not (info.stride and info.listed), "ranks told in one way", "two")
        _need(0 <= info.timeout_s <= _LONGEST_S, "a time-out", info.timeout_s)
        listed += len(info.listed) // 4
    _need(listed <= limits.listed, f"at most {limits.listed} listed ranks", listed)
    _need(len(sheet.texts) <= limits.texts, f"at most {limits.texts} texts", len(sheet.texts))
    _hashes(sheet.texts)
    _names(sheet.texts.values(), limits.text, "text", least=0)


def check_found(found: Found, limits: SheetLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `found` is usable."""
    _check_head(found, limits)
    for ranks in (found.stacks, found.logs):
        _need(len(ranks) <= limits.ranks, f"at most {limits.ranks} ranks", len(ranks))
        _ranks(ranks, limits)
    for stack in found.stacks.values():
        _need(len(stack.text) <= limits.stack, "a stack", f"{len(stack.text)} characters")
        _need(len(stack.how) <= limits.name, "a short name", len(stack.how))
        _need(0 <= stack.taken_s < _LONGEST_S, "seconds", stack.taken_s)
    _names(found.logs.values(), limits.stack, "log", least=0)
    _need(len(found.probes) <= limits.rows, f"at most {limits.rows} probes", len(found.probes))
    for probe in found.probes:
        _need(0 <= probe.nonce < _COUNT, "a nonce", probe.nonce)
        _names((probe.src, probe.dst), limits.name, "name of a node")
        # Infinite says that nothing came back; NaN is below nothing.
        _need(probe.seconds > 0, "seconds above 0", probe.seconds)
        _need(len(probe.error) <= limits.text, "a short error", len(probe.error))


def check_orders(orders: Orders, limits: SheetLimits) -> None:
    """Raise `CorruptError`, kind ``bad-sheet``, unless all of `orders` is usable."""
    _need(0 < orders.period_s < 3600, "a period below an hour", orders.period_s)
    for ranks in (orders.stacks, orders.calls):
        _need(len(ranks) <= limits.ranks, f"at most {limits.ranks} ranks", len(ranks))
        _ranks(ranks, limits)
    _need(len(orders.probes) <= limits.rows, f"at most {limits.rows} probes", len(orders.probes))
    for probe in orders.probes:
        _need(0 <= probe.nonce < _COUNT, "a nonce", probe.nonce)
        _names((probe.from_node, probe.to_node, probe.address), limits.name, "name of a node")
        _need(0 < probe.size <= 1 << 24, "a probe of at most 16 MiB", probe.size)


# --- one thing ----------------------------------------------------------------------------------


def _need(true: bool, wanted: str, found: object) -> None:
    if not true:
        raise bad(wanted, found)


def _within(values: Array, low: int, high: int, what: str) -> None:
    if len(values):
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise bad(f"{what} from {low} to {high}", f"{least} to {most}")


def _ages(values: Array, what: str, *, known: bool = False) -> None:
    """Check ages: finite and not negative; NaN where an age need not be `known`."""
    if not known:
        values = values[~np.isnan(values)]
    if not bool(((values >= 0) & (values < _LONGEST_S)).all()):
        raise bad(f"ages of {what}", "negative, endless or not a number")


def _names(texts: Iterable[str], most: int, what: str, *, least: int = 1) -> None:
    for text in texts:
        if not least <= len(text) <= most:
            raise bad(f"a {what} of {least} to {most} characters", f"{len(text)} characters")


def _hashes(keys: Iterable[int]) -> None:
    for key in keys:
        if not 0 <= key < 1 << 64:
            raise bad("a hash", key)


def _ranks(ranks: Iterable[int], limits: SheetLimits) -> None:
    for rank in ranks:
        if not 0 <= rank < limits.world:
            raise bad("a rank", rank)
