"""Incidents as bytes: as the history keeps them, and as the API tells them."""

from __future__ import annotations

from typing import Any

import msgspec

from ckptd.daemon.documents.columns import Names
from ckptd.decoding import msgpack_decoder
from ckptd.monitor.incidents.incident import Incident

__all__ = ["MOST_EVIDENCE", "essence", "from_stored", "shown", "to_stored"]

MOST_EVIDENCE = 256 << 10
"""Characters of stacks, calls and logs of one incident that are kept."""

_decoder = msgpack_decoder(Incident)


def to_stored(incident: Incident) -> bytes:
    """Return an incident as the history keeps it; of too much evidence the rest is left out."""
    return msgspec.msgpack.encode(_clipped(incident))


def from_stored(data: bytes) -> Incident | None:
    """Return the incident that the history kept; None if it is another version's."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None


def _clipped(incident: Incident) -> Incident:
    left = MOST_EVIDENCE
    stacks = {}
    for rank, stack in incident.stacks.items():
        text = stack.text[: max(left, 0)]
        left -= len(text)
        if text:
            stacks[rank] = msgspec.structs.replace(stack, text=text)
    kept: dict[str, dict[int, str]] = {"calls": {}, "logs": {}}
    for name, into in kept.items():
        for rank, text in getattr(incident, name).items():
            into[rank] = text[: max(left, 0)]
            left -= len(into[rank])
    return msgspec.structs.replace(incident, stacks=stacks, calls=kept["calls"], logs=kept["logs"])


def shown(incident: Incident, names: Names | None = None, evidence: bool = False) -> dict[str, Any]:
    """Return an incident as the API tells it: groups by name, stacks and calls if asked for.

    Hashes of groups are hexadecimal text, as they do not fit a JavaScript number.
    """
    body: dict[str, Any] = msgspec.to_builtins(_clipped(incident), str_keys=True)
    groups = incident.verdict.groups
    body["verdict"]["groups"] = [f"{g:016x}" for g in groups]
    if names is not None:
        body["verdict"]["group_names"] = [names.group(g) for g in groups]
    body["evidence"] = {
        "stacks": sorted(incident.stacks),
        "calls": sorted(incident.calls),
        "logs": sorted(incident.logs),
        "probes": len(incident.probes),
    }
    if not evidence:
        for name in ("stacks", "calls", "logs", "probes"):
            del body[name]
    return body


def essence(incident: Incident) -> tuple[object, ...]:
    """Return what has to differ for a change to be told and kept at once."""
    return (
        incident.state,
        incident.kind,
        tuple((s.target, s.name) for s in incident.verdict.suspects),
        len(incident.stacks),
        len(incident.calls),
        len(incident.logs),
        len(incident.probes),
        incident.consequences,
        incident.acknowledged_at,
        incident.note,
        incident.action,
        incident.enforced,
        incident.response,
    )
