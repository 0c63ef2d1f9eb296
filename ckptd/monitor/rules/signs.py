"""Hardware signs beside verdicts: how they raise or lower confidence, how long they count.

A sign on a suspect's node takes part of the doubt away. One that most nodes show at the same time
tells none of them apart: a verdict that names one of them is less sure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ckptd.errors import one_line
from ckptd.monitor.report import Sign
from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict

SIGN_S = 120.0
"""A sign counts for so long after it was last seen."""
SIGNS = "signs of nodes"
_MOST_LINES = 8


def recent_signs(signs: Sequence[Sign], age_s: float) -> tuple[Sign, ...]:
    """Return those of a report that count, `age_s` after it was made."""
    return tuple(s for s in signs if s.age_s + age_s <= SIGN_S)


def with_signs(
    verdict: Verdict, signs: Mapping[str, Sequence[Sign]], node_of: Mapping[int, str]
) -> Verdict:
    """Return a verdict with what the nodes' hardware says to it; once, if it is called again.

    Parameters
    ----------
    signs
        By the name of each node that reports.
    node_of
        Node of each rank.
    """
    speaking = {
        node: mine
        for node, of in signs.items()
        if (mine := [s for s in of if verdict.kind in s.kinds])
    }
    if not speaking or SIGNS in verdict.numbers:
        return verdict
    seen = Counter(
        what for mine in speaking.values() for what in {(s.source, s.what) for s in mine}
    )
    usual = {what for what, count in seen.items() if 2 <= count > len(signs) / 2}
    where = [_nodes(s, node_of) for s in verdict.suspects]
    suspects = [
        msgspec.structs.replace(s, confidence=_weighed(s.confidence, of, speaking, usual))
        for s, of in zip(verdict.suspects, where, strict=True)
    ]
    if sum(s.confidence for s in verdict.suspects) <= 1.001:  # only one of them can be meant
        total = max(sum(s.confidence for s in suspects), 1.0)
        suspects = [
            msgspec.structs.replace(s, confidence=round(s.confidence / total, 3)) for s in suspects
        ]
    suspects.sort(key=lambda s: -s.confidence)
    first = [(s.target, s.name) for of in (suspects, verdict.suspects) for s in of[:1]]
    named = {node for nodes in where for node in nodes}
    lines = [
        f"node {node}{'' if node in named else ', which is not suspected'}: "
        f"{s.source}: {one_line(s.text)}"
        + (", as on most nodes" if (s.source, s.what) in usual else "")
        for node in sorted(speaking, key=lambda node: (node not in named, node))
        for s in speaking[node]
    ]
    return msgspec.structs.replace(
        verdict,
        suspects=tuple(suspects),
        place=verdict.place if first[:1] == first[1:] else "",
        evidence=(*verdict.evidence, *lines[:_MOST_LINES]),
        numbers={**verdict.numbers, SIGNS: float(len(lines))},
    )


def _nodes(suspect: Suspect, node_of: Mapping[int, str]) -> tuple[str, ...]:
    if suspect.target is SuspectKind.RANK:
        node = node_of.get(int(suspect.name)) if suspect.name.isdecimal() else None
        return () if node is None else (node,)
    if suspect.target is SuspectKind.LINK:
        return tuple(suspect.name.split(">"))
    return () if suspect.target is SuspectKind.GROUP else (suspect.name,)


def _weighed(
    confidence: float,
    nodes: Sequence[str],
    speaking: Mapping[str, Sequence[Sign]],
    usual: set[tuple[str, str]],
) -> float:
    strongest: dict[tuple[str, str], float] = {}
    for sign in (s for node in nodes for s in speaking.get(node, ())):
        key = (sign.source, sign.what)
        strongest[key] = max(sign.weight, strongest.get(key, 0.0))
    for key, weight in strongest.items():
        confidence += -confidence * weight if key in usual else (1.0 - confidence) * weight
    return round(confidence, 3)
