"""Joining the node's agent as a trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ckptd.engine.agentlink import AgentPlace, connect_agent
from ckptd.engine.channel import Channel, SocketChannel
from ckptd.engine.job import Hello, Response
from ckptd.engine.tiers import LINGER_S, TierSpec
from ckptd.errors import CkptdError, WorkerError

__all__ = ["START_S", "AgentSpec", "join_agent"]

START_S = 60.0
"""For a worker or an agent to be ready, in seconds."""
_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """The agent of this node, and what it is to keep.

    Attributes
    ----------
    place
        Where it is found, or started.
    tiers, linger_s, bind, key
        See `Hello`.
    """

    place: AgentPlace
    tiers: tuple[TierSpec, ...] = ()
    linger_s: float = LINGER_S
    bind: str = ""
    key: str = ""


def join_agent(
    agent: AgentSpec, hello: Hello, wanted: Callable[[], bool]
) -> tuple[Channel, Response | None]:
    """Return a connection to the node's agent, and its first word.

    One that was killed may still take a connection while its memory is given back: so what does
    not answer is asked again, for `START_S` and while it is `wanted`.

    Raises
    ------
    WorkerError
        No agent answers.
    """
    hello = msgspec.structs.replace(
        hello, tiers=agent.tiers, linger_s=agent.linger_s, bind=agent.bind, key=agent.key
    )
    end = time.monotonic() + START_S
    found = "no answer"
    while wanted() and time.monotonic() < end:
        channel = None
        try:
            channel = SocketChannel(connect_agent(agent.place), Response)
            channel.send(hello)
            item = channel.receive(max(0.1, end - time.monotonic()))
        except (CkptdError, EOFError, OSError, msgspec.MsgspecError) as error:
            if channel is not None:
                channel.close()
            found = str(error)
            time.sleep(_AGAIN_S)
            continue
        return channel, None if item is None else item[0]
    raise WorkerError("no agent", where=str(agent.place.socket), found=found)
