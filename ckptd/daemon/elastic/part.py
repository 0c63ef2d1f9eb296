"""What a daemon does where its job has a controller: it listens, tells the watch, and acts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ckptd.daemon.documents import ControllerDocument, ControllerLinkDocument, Proposal
from ckptd.daemon.elastic.acting import Acting
from ckptd.daemon.elastic.link import ControllerLink
from ckptd.daemon.elastic.meter import Meter
from ckptd.daemon.rounds import Rounds
from ckptd.daemon.tape import Tape
from ckptd.elastic.messages import Order
from ckptd.elastic.wire import Answer, Status
from ckptd.errors import TransientStoreError
from ckptd.monitor.incidents.incident import Incident
from ckptd.monitor.recording import FENCING, Frame
from ckptd.monitor.report import Fencing, pack
from ckptd.monitor.settings import WatchSettings
from ckptd.monitor.watch import Watch

__all__ = ["ElasticPart"]

_MOST_REASON = 500


class ElasticPart:
    """The controller's link, the policy, and what both tell.

    Parameters
    ----------
    addresses
        Where the controller is; see `ckptd.daemon.elastic.link.ControllerLink`.
    job, secret
        Whose.
    settings
        Of the watch.
    rounds
        Owns the watch.
    tape
        Where what the watch is told is kept.
    changed
        Called when there is something new to tell, from any thread.
    answered
        Called in the watch's thread with an incident that was answered.
    url
        Of this daemon, for nodes; see `ckptd.daemon.elastic.link.ControllerLink`.

    Attributes
    ----------
    controller
        The link.
    meter
        What metrics count.
    """

    def __init__(
        self,
        addresses: Callable[[], str],
        job: str,
        secret: bytes,
        settings: WatchSettings,
        *,
        rounds: Rounds,
        tape: Tape,
        changed: Callable[[], None],
        answered: Callable[[Watch, Incident], None],
        url: str = "",
    ) -> None:
        self._rounds, self._tape = rounds, tape
        self._changed, self._answered = changed, answered
        self._fenced = -1
        self._last: Frame | None = None
        self.meter = Meter()
        self.controller = ControllerLink(addresses, job, secret, self._heard, url)
        self._acting = Acting(self.controller, settings, self._mark)

    def start(self) -> None:
        """Begin to connect."""
        self.controller.start()
        self._acting.start()

    def close(self) -> None:
        """End."""
        self.controller.close()
        self._acting.close()

    # --- what is heard ----------------------------------------------------------------------------

    def _heard(self, status: Status | None) -> None:
        if status is not None:
            self.meter.take(status)
            if status.generation > self._fenced:
                self._fence(status)
        self._changed()

    def _fence(self, status: Status) -> None:
        """Tell the watch that ranks of generations before the newest end on purpose."""
        fencing = Fencing(below=status.generation, reason=status.reason[:_MOST_REASON])

        def work(watch: Watch, now: float) -> None:
            watch.fence(fencing, now)
            frame = Frame(now, FENCING, pack(fencing))
            self._last = frame
            self._tape.add(frame)

        try:
            self._rounds.call(work)
        except TransientStoreError:
            return  # too much waits; the next status tells it again
        self._fenced = status.generation

    @property
    def last_fence(self) -> Frame | None:
        """The newest frame that told of fencing, for recordings that begin after it."""
        return self._last

    # --- what is done -----------------------------------------------------------------------------

    def judge(self, open_: Sequence[Incident], others: Sequence[Incident]) -> None:
        """Carry out the policy on open incidents; returns at once."""
        self._acting.judge(open_, others)

    def order(self, order: Order) -> Answer:
        """Hand over an order; see `ControllerLink.order`."""
        return self.controller.order(order)

    def enforce(self, incident: Incident, others: Sequence[Incident]) -> Answer:
        """Carry out an incident's response; see `Acting.enforce`."""
        return self._acting.enforce(incident, others)

    def proposal(self, incident: Incident, others: Sequence[Incident]) -> Proposal | None:
        """Return what a person may have done about an incident, None if nothing."""
        if not self.controller.connected or incident.response:
            return None
        found = self._acting.response(incident, others)
        return None if found is None else Proposal(found.text, found.nodes)

    def _mark(self, ident: str, done: bool, words: str) -> Future[Incident]:
        def work(watch: Watch, now: float) -> Incident:
            incident = watch.answered(ident, done, words)
            self._answered(watch, incident)
            return incident

        return self._rounds.call(work)

    # --- what is told -----------------------------------------------------------------------------

    def document(self) -> ControllerDocument:
        """Return the controller's newest status, and whether it is connected."""
        link = self.controller
        address = link.status.address if link.status is not None else ""
        return ControllerDocument(ControllerLinkDocument(link.connected, address), link.status)
