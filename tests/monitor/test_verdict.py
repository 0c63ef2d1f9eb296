"""Verdicts are plain data."""

from __future__ import annotations

import msgspec

from ckptd.monitor.verdict import Suspect, SuspectKind, Verdict, VerdictKind


def test_a_verdict_survives_its_way_through_json() -> None:
    verdict = Verdict(
        kind=VerdictKind.HANG,
        suspects=(
            Suspect(SuspectKind.NODE, "n1", 0.9),
            Suspect(SuspectKind.RANK, "3", 0.9, "stopped"),
        ),
        evidence=("it stands still",),
        rules_out=("a deadlock",),
        refuted_by="it moves",
        action="restart",
        numbers={"idle s": 31.5},
        groups=(7,),
    )
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict
    assert verdict.names() == ("3",)
    assert verdict.names(SuspectKind.NODE) == ("n1",)
