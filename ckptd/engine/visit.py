"""What an agent tells visitors, who are no trainers: what it holds, for whom, and when it ends."""

from __future__ import annotations

import socket

import msgspec

from ckptd.engine.channel import SocketChannel
from ckptd.errors import DeadlineError, WorkerError

__all__ = ["AgentStatus", "AskEnd", "AskStatus", "KeptSnapshot", "visit"]

ANSWER_S = 10.0


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """First message of a visitor: tell me what you hold."""


class AskEnd(msgspec.Struct, frozen=True, tag=True):
    """First message of a visitor: end when your trainers have ended.

    Attributes
    ----------
    now
        Or without waiting for them: they find no agent at their next save, and start another.
    """

    now: bool = False


class KeptSnapshot(msgspec.Struct, frozen=True):
    """An attempt of which shares lie in the memory of an agent.

    Attributes
    ----------
    ranks, guests
        Whose shares: ranks of this node, and of the node whose peer tier this memory is.
    world
        Ranks of the job that saved it; 0 before that is known.
    bytes
        Of all that lies here.
    whole
        All ranks' shares lie here.
    complete
        Near tiers of which the agent knows that every rank's share is there, on whichever node.
    """

    step: int
    generation: int
    attempt: str
    ranks: tuple[int, ...]
    guests: tuple[int, ...]
    world: int
    bytes: int
    whole: bool
    complete: tuple[str, ...]


class AgentStatus(msgspec.Struct, frozen=True):
    """The answer to a visitor.

    Attributes
    ----------
    job, node, socket, pid
        Whose agent it is, and where.
    ranks
        Of the trainers that are connected.
    snapshots
        In memory, oldest first.
    folder
        URL of the local tier; None without one.
    ends_in_s
        When it ends if nobody comes, in seconds; None while trainers are connected, and for one
        that stays until a signal.
    ending
        It was asked to end when its trainers have ended.
    """

    job: str
    node: str
    socket: str
    pid: int
    ranks: tuple[int, ...]
    snapshots: tuple[KeptSnapshot, ...]
    folder: str | None
    ends_in_s: float | None
    ending: bool


def visit(
    sock: socket.socket, message: AskStatus | AskEnd, timeout_s: float = ANSWER_S
) -> AgentStatus:
    """Ask an agent over a fresh connection, which is closed afterwards.

    Raises
    ------
    WorkerError
        It went away, or is of another version.
    DeadlineError
        kind ``agent``: it does not answer within `timeout_s`.
    """
    channel = SocketChannel(sock, AgentStatus)
    try:
        channel.send(message)
        item = channel.receive(timeout_s)
    except (EOFError, msgspec.MsgspecError) as error:
        raise WorkerError("the agent gives no answer", found=str(error)) from error
    finally:
        channel.close()
    if item is None:
        raise DeadlineError(
            "the agent does not answer", kind="agent", wanted=f"within {timeout_s:.0f} s"
        )
    status: AgentStatus = item[0]
    return status
