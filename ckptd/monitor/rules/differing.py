"""Deadlocks: which ranks of a circle of waits left out a call or made one too many."""

from __future__ import annotations

import numpy as np

from ckptd.monitor.job import JobView
from ckptd.monitor.rules.mismatch import P2P
from ckptd.monitor.stats import Array, mix

_OFTEN = 20
"""Calls of a group that tell those that are made again and again from a first one."""


def strayed(job: JobView, circle: Array) -> Array:
    """Return the rows of `circle` that went from one call to another as they never did before.

    All others went a way that was gone before. Ranks rightly differ from each other: each is
    compared with its own past, and with the others where all are in all groups of the circle, or
    make the same calls. Empty where that does not single out fewer than half, or one of two: it is
    new to all then. Which of two that send and receive strayed does not show.
    """
    calls = job.calls
    last = job.last_call[circle]
    if not len(calls) or (last < 0).any():
        return circle[:0]
    ranks = calls["row"]
    groups = job.groups[np.isin(job.groups["row"], circle)]
    shared = np.isin(groups["group"], job.ranks["pending_group"][circle])
    waited_in = len(np.unique(groups["group"][shared]))
    whose = np.zeros(len(ranks)) if shared.sum() == len(circle) * waited_in else ranks
    what = mix(calls["op"], calls["site"], calls["bytes"])
    new = _new_ways(ranks, what, whose, circle)[last]
    odd = _few(circle[new], circle)
    if not len(odd) and new.any():
        # A round may have more calls than are kept of a rank: others have gone its way meanwhile.
        new &= _new_ways(ranks, what, np.zeros(len(ranks)), circle)[last]
        odd = _few(circle[new], circle)
        before = np.isin(ranks, odd)
        before[last] = False
        if not np.isin(what[before], what[~np.isin(ranks, odd)]).all():
            odd = odd[:0]  # it has a program of its own
    number = calls["seq"][last]
    if not len(odd) and len(circle) > 2 and (number[number > 1] >= _OFTEN).all():
        odd = _few(circle[number == 1], circle)  # alone in a group that was never used
    return odd[:0] if np.isin(calls["op"][job.last_call[odd]], P2P).any() else odd


def _new_ways(ranks: Array, what: Array, whose: Array, circle: Array) -> Array:
    """Return of each call whether nobody of the same `whose` has come to it from the one before."""
    ways = np.zeros(len(what), np.uint64)
    ways[1:] = mix(what[:-1], what[1:], whose[1:], np.isin(ranks[1:], circle))
    ways[1:][ranks[1:] != ranks[:-1]] = 0
    _, codes, counts = np.unique(ways, return_inverse=True, return_counts=True)
    return counts[codes] <= 1


def outvoted(job: JobView, circle: Array) -> Array:
    """Return the rows of `circle` that a strict majority has gone past, or not reached.

    Only of ranks that are in the same groups: of others one that waits in a group of its own is
    behind as well. All of the majority are at the same call in each group, so that the others
    explain the circle.
    """
    groups = job.groups
    mine = np.isin(groups["row"], circle) & np.isin(
        groups["group"], job.ranks["pending_group"][circle]
    )
    here = groups[np.isin(groups["group"], groups["group"][mine])]
    members = np.unique(here["row"])
    ids, codes = np.unique(here["group"], return_inverse=True)
    if len(here) != len(members) * len(ids) or (here["size"] != len(members)).any():
        return circle[:0]
    places = np.zeros((len(members), len(ids)), np.int64)
    places[np.searchsorted(members, here["row"]), codes] = here["entered"]
    _, which, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    best = int(np.argmax(counts))
    if 2 * counts[best] <= len(members):
        return circle[:0]
    return _few(members[which.reshape(-1) != best], circle)


def _few(some: Array, circle: Array) -> Array:
    """Return `some`, if they are of `circle` and clearly fewer than those that are not."""
    one_of_two = len(some) == 1 and len(circle) == 2
    few = len(some) and (2 * len(some) < len(circle) or one_of_two)
    return some if few and np.isin(some, circle).all() else circle[:0]
