"""Carries out the responses of incidents: the policy's by itself, a person's when asked."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ckptd.daemon.elastic.link import ControllerLink
from ckptd.daemon.elastic.policy import Response, is_over, response
from ckptd.elastic.messages import Suspected
from ckptd.elastic.wire import Answer
from ckptd.errors import CkptdError, ConflictError, NotFoundError
from ckptd.monitor.incidents.incident import Incident
from ckptd.monitor.settings import WatchSettings

__all__ = ["Acting"]

_MOST_REASON = 300


class Acting:
    """Tells the controller whom incidents name, once an incident, in a thread of its own.

    Parameters
    ----------
    controller
        Who decides.
    settings
        The policy.
    mark
        Notes with an incident whether something was done, and what, in words.
    """

    def __init__(
        self,
        controller: ControllerLink,
        settings: WatchSettings,
        mark: Callable[[str, bool, str], Future[Incident]],
    ) -> None:
        self._controller, self._settings, self._mark = controller, settings, mark
        self._waiting: queue.SimpleQueue[tuple[Incident, Response] | None] = queue.SimpleQueue()
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="acting", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End after what is at hand, which has its own deadline."""
        self._waiting.put(None)
        if self._thread.is_alive():
            self._thread.join(1.0)

    def response(self, incident: Incident, others: Sequence[Incident]) -> Response | None:
        """Return what is to be done about an open incident now; None if nothing is."""
        status = self._controller.status
        if incident.state != "open" or incident.enforced or status is None or status.ended:
            return None
        if is_over(incident, status):
            return None
        wanted = self._settings.policy.get(incident.verdict.kind, "log")
        return response(incident, status, others, wanted)

    def judge(self, open_: Sequence[Incident], others: Sequence[Incident]) -> None:
        """Carry out what the policy says is done without a person; returns at once."""
        if not self._controller.connected:
            return
        for incident in open_:
            if self._settings.policy.get(incident.verdict.kind) != "act":
                continue
            chosen = self.response(incident, others)
            if chosen is not None and chosen.alone and self._take(incident.id):
                self._waiting.put((incident, chosen))

    def enforce(self, incident: Incident, others: Sequence[Incident]) -> Answer:
        """Carry out the response that a person has agreed to; waits for the controller.

        Raises
        ------
        ConflictError
            kind ``no-response``: there is nothing to be done about it, or no more.
        NotFoundError
            kind ``no-controller``: none answers.
        """
        chosen = self.response(incident, others)
        if chosen is None or not self._take(incident.id):
            raise ConflictError(
                "nothing is to be done about this incident now",
                kind="no-response",
                where=incident.id,
                hint="it is closed, was answered, or its class has no response: orders are there"
                " for everything else",
            )
        return self._send(incident, chosen)

    def _take(self, ident: str) -> bool:
        with self._lock:
            new = ident not in self._asked
            self._asked.add(ident)
            return new

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            try:
                self._send(*item)
            except CkptdError as error:
                # It is tried again with the next round, for as long as the incident is open.
                print(f"ckptd: {item[0].id}: {error}", file=sys.stderr, flush=True)  # noqa: T201

    def _send(self, incident: Incident, chosen: Response) -> Answer:
        reason = f"{incident.id}: {incident.kind} of {_who(incident)}"[:_MOST_REASON]
        suspected = Suspected(
            nodes=chosen.nodes,
            reason=reason,
            since_s=max(incident.latency_s + time.time() - incident.opened_at, 0.0),
            generation=incident.generation,
        )
        try:
            answer = self._controller.suspect(suspected)
        except NotFoundError:
            with self._lock:
                self._asked.discard(incident.id)
            raise
        words = chosen.text if answer.ok else f"{chosen.text}: refused, {answer.text}"
        self._mark(incident.id, answer.ok, words)
        return answer


def _who(incident: Incident) -> str:
    named = [f"{s.target} {s.name}" for s in incident.verdict.suspects[:4]]
    left = len(incident.verdict.suspects) - len(named)
    return (", ".join(named) or "nobody that can be named") + (f" and {left} more" if left else "")
