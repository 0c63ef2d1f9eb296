"""`Launcher`: what a scheduler's plugin implements: start, stop, list machines, replace, requeue.

One class a scheduler. A job needs one only from level 2 on: below it, what is restarted are the
workers of launchers that go on. `ckptd.testing.launchers.LauncherContract` has the tests that each
passes.
"""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from ckptd.base.closing import Closing
from ckptd.errors import NotFoundError

Command = Callable[[str], Sequence[str]]
"""Returns the command line of the launcher of the node with this name."""


class MachineState(enum.StrEnum):
    """The state of a node, as a scheduler says it."""

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One node that the job has, or had.

    Attributes
    ----------
    name
        Its name, which is that of the node for the controller too.
    state
        ``draining``: what runs there goes on for now, and nothing new is started.
    running
        Whether a launcher that was started by this process runs there.
    reason
        What the scheduler says about the state; empty if all is well.
    code
        With what the launcher that this process started there last has ended; null while it runs,
        where none was, and after `Launcher.stop`. A signal is negative, or 128 more than itself.
    """

    name: str
    state: MachineState = MachineState.UP
    running: bool = False
    reason: str = ""
    code: int | None = None


class Hint(msgspec.Struct, frozen=True, kw_only=True):
    """A node will be taken away.

    Attributes
    ----------
    node
        Which.
    seconds
        From now until it is gone.
    reason
        In the scheduler's words.
    """

    node: str
    seconds: float
    reason: str = ""


class Launcher(Closing):
    """Starts and stops node launchers. One thread at a time may call it.

    Names of nodes are those of the scheduler. A node that is not the job's is refused, and nothing
    is done then. Nothing here waits for a scheduler to find out that a machine is dead.
    """

    @abstractmethod
    def start(self, nodes: Sequence[str], timeout_s: float) -> None:
        """Start a launcher on each of these nodes; where one runs, nothing is done.

        On return each was handed to the scheduler; what comes of it shows in `machines`.

        Raises
        ------
        UsageError
            kind ``unknown-node``: the job has no node of this name.
        DeadlineError
            Not done in time; some may have been started.
        StoreError
            It refused.
        """

    @abstractmethod
    def stop(self, nodes: Sequence[str] | None, timeout_s: float) -> None:
        """Kill the launchers of these nodes, by default all, with all that they have started.

        On return they are gone, but on nodes that cannot be reached. Where none runs, nothing is
        done.

        Raises
        ------
        UsageError, DeadlineError, StoreError
            As of `start`.
        """

    @abstractmethod
    def machines(self, timeout_s: float) -> tuple[Machine, ...]:
        """Return the nodes that the job has or had, by name.

        Raises
        ------
        DeadlineError, StoreError
            As of `start`.
        """

    def replace(self, node: str, timeout_s: float) -> str:
        """Give a node back for another one, and return that one's name; nothing is started on it.

        Raises
        ------
        NotFoundError
            kind ``no-spare``: no other one is available.
        UsageError, DeadlineError, StoreError
            As of `start`.
        """
        raise NotFoundError("no replacement node is available", kind="no-spare", where=node)

    def hints(self, timeout_s: float) -> tuple[Hint, ...]:
        """Return which nodes will be taken away; each once, and again if it had been taken back.

        Raises
        ------
        DeadlineError, StoreError
            As of `start`.
        """
        return ()

    def requeue(self, reason: str, timeout_s: float) -> bool:
        """Have the whole job submitted again; False where a scheduler does that by an exit code.

        Raises
        ------
        DeadlineError, StoreError
            As of `start`.
        """
        return False

    def close(self) -> None:
        """Stop all launchers, as far as they can be reached. Idempotent."""
