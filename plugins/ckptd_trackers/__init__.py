"""TensorBoard, MLflow and W&B show what happens to a job: saves, restarts, incidents, goodput."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, Self, cast

from ckptd import events
from ckptd.errors import CkptdError, UsageError
from ckptd.monitor.cli import connect

__all__ = ["Tracker", "Tracking", "track"]

_CLOSE_S = 5.0
_QUEUED = 7
"""Saves under way whose beginning is remembered, besides the newest."""


class Tracker(Protocol):
    """Receiver of values and texts: wraps an object of a tracker's library, or is your own."""

    def number(self, name: str, value: float, step: int) -> None:
        """Show a value at a step."""

    def text(self, name: str, text: str, step: int) -> None:
        """Show a sentence at a step."""

    def checkpoint(self, place: str, record: str, step: int, generation: int) -> None:
        """Refer to a checkpoint: `place` is for ckptd, `record` the URL of its commit record."""


class _TensorBoard:
    """Writes to a `torch.utils.tensorboard.SummaryWriter`."""

    def __init__(self, writer: Any) -> None:
        self.number: Callable[[str, float, int], None] = writer.add_scalar
        self.text: Callable[[str, str, int], None] = writer.add_text

    def checkpoint(self, place: str, record: str, step: int, generation: int) -> None:
        self.text("ckptd/checkpoints", place, step)


class _MlFlow:
    """Writes to an `mlflow.ActiveRun`."""

    def __init__(self, run: Any) -> None:
        from mlflow import MlflowClient

        self._client, self._run = MlflowClient(), run.info.run_id
        self._texts: Counter[str] = Counter()

    def number(self, name: str, value: float, step: int) -> None:
        self._client.log_metric(self._run, name, value, step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._texts[name] += 1
        file = f"{name}/{step:012d}-{self._texts[name]}.txt"
        self._client.log_text(self._run, text, file)

    def checkpoint(self, place: str, record: str, step: int, generation: int) -> None:
        told = {"checkpoint": place, "commit": record, "step": step, "generation": generation}
        file = f"ckptd/checkpoints/{step:012d}-g{generation:08d}.json"
        self._client.log_dict(self._run, told, file)
        self._client.set_tag(self._run, "ckptd.checkpoint", place)


class _WandB:
    """Writes to a `wandb.Run`, without a step of its own: those of the user's calls stay."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("ckptd/step", hidden=True)
        run.define_metric("ckptd/*", step_metric="ckptd/step")

    def number(self, name: str, value: float, step: int) -> None:
        self._run.log({name: value, "ckptd/step": step}, commit=False)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.alert(title=name, text=f"step {step}: {text}")

    def checkpoint(self, place: str, record: str, step: int, generation: int) -> None:
        import wandb

        metadata = {"checkpoint": place, "step": step, "generation": generation}
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", "checkpoint", metadata=metadata)
        artifact.add_reference(record, name="commit.json", checksum=False)
        self._run.log_artifact(artifact, aliases=[f"step-{step}"])


class _Told(events.Event, frozen=True, kw_only=True):
    """Numbers and texts of the daemon, on their way to a tracker."""

    numbers: dict[str, float]
    texts: tuple[tuple[str, str], ...]


class _Feed:
    """Gives one tracker what happens, in a thread of its own."""

    def __init__(self, tracker: Tracker, root: str) -> None:
        self._tracker, self._root = tracker, root.rstrip("/")
        self._begun: dict[str, int] = {}
        self._referred = 0, 0
        self._failed = self._skipped = self._newest = 0
        self.subscription = events.subscribe(self._hear, relayed=True)

    def _hear(self, event: events.Event | _Told) -> None:
        self._newest = step = event.step or self._newest
        number = self._tracker.number
        match event:
            case _Told():
                for name, value in event.numbers.items():
                    number(name, value, step)
                for name, text in event.texts:
                    self._tracker.text(name, text, step)
            case events.SaveBegun():
                self._begun = {event.attempt: event.at_ns, **dict([*self._begun.items()][:_QUEUED])}
                number("ckptd/generation", event.generation, step)
            case events.Span(name="call", error=""):
                number("ckptd/save_blocked_s", event.duration_ns / 1e9, step)
            case events.SaveDurable():
                begun_ns = self._begun.get(event.attempt, event.at_ns)
                number(f"ckptd/save_durable_s/{event.tier}", (event.at_ns - begun_ns) / 1e9, step)
                number(f"ckptd/save_bytes/{event.tier}", event.bytes, step)
                self._refer(step, event.generation, event.tier)
            case events.SaveFailed():
                self._failed += 1
                number("ckptd/saves_failed", self._failed, step)
                self._tracker.text("ckptd/saves_failed", event.message, step)
            case events.SaveSkipped():
                self._skipped += 1
                number("ckptd/saves_skipped", self._skipped, step)
            case events.LoadDone():
                number("ckptd/load_s", event.duration_ns / 1e9, step)
                text = f"went on from step {step} of generation {event.generation}"
                self._tracker.text("ckptd/restarts", "; ".join([text, *event.warnings]), step)

    def _refer(self, step: int, generation: int, tier: str) -> None:
        """Refer to a commit, once. A near tier is called `local` as well, and has no record."""
        record = f"{self._root}/commits/{step:012d}-g{generation:08d}.json"
        if (step, generation) != self._referred and (tier == "remote" or os.path.exists(record)):
            self._referred = step, generation
            url = record if "://" in record else f"file://{record}"
            self._tracker.checkpoint(f"{self._root}@{step}-g{generation}", url, step, generation)


class Tracking:
    """Trackers at work; made by `track`. Leaving its ``with`` block closes it."""

    def __init__(
        self, trackers: list[Tracker], root: str, ask: Callable[[], Any] | None, period_s: float
    ) -> None:
        self._feeds = [_Feed(tracker, root) for tracker in trackers]
        self._stop = threading.Event()
        self._seen: set[str] = set()
        if ask is not None:
            arguments = (ask, period_s)
            threading.Thread(target=self._poll, args=arguments, daemon=True).start()

    @property
    def lost(self) -> int:
        """Number of events that trackers did not get: they were too slow, or failed."""
        return sum(f.subscription.dropped + f.subscription.failed for f in self._feeds)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Give trackers what is left, for at most so many seconds each. Idempotent."""
        self._stop.set()
        for feed in self._feeds:
            feed.subscription.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _poll(self, ask: Callable[[], Any], period_s: float) -> None:
        client = None
        while not self._stop.wait(period_s):
            try:
                client = client or ask()
                told = self._told(client)
            except (CkptdError, LookupError, TypeError, ValueError):  # it may come, or come back
                client = None
                continue
            for feed in self._feeds:
                feed.subscription.offer(cast(Any, told))

    def _told(self, client: Any) -> _Told:
        job, texts = client.get("/job"), []
        step = (job["step"] or {"max": 0})["max"]
        for incident in reversed(client.get("/incidents", limit=50)["incidents"]):
            if self._new(f"{incident['id']} {incident['state']}"):
                text = f"{incident['id']} is {incident['state']}: {incident['headline']}"
                texts.append(("ckptd/incidents", text))
        for life in client.get("/elastic")["generations"]:
            if self._new(f"generation {life['generation']}"):
                text = f"generation {life['generation']} began with {life['world']} ranks"
                texts.append(("ckptd/restarts", text))
        numbers = {"ckptd/incidents_open": float(len(job["open_incidents"]))}
        if (share := (job["goodput"] or {"share": None})["share"]) is not None:
            numbers["ckptd/goodput"] = float(share)
        return _Told(step=step, generation=0, rank=0, numbers=numbers, texts=tuple(texts))

    def _new(self, what: str) -> bool:
        new = what not in self._seen
        self._seen.add(what)
        return new


def track(
    *trackers: Any,
    root: str,
    daemon: str | None = None,
    job: str | None = None,
    period_s: float = 10.0,
) -> Tracking:
    """Show in trackers what happens to the checkpoints of this rank, and to the job.

    Call it on rank 0, once the trackers' runs are there and before the `ckptd.Checkpointer`. They
    get what the events of this process tell: of each save how long it blocked the loop and took to
    be durable, its bytes, what failed or was skipped; each commit, as a reference to its record;
    loads, which are restarts. Where a daemon (``ckptd watch``, ``ckptd serve``) watches the job,
    they also get its incidents, its goodput, and each life of the job.

    Each tracker has a thread and a queue of its own. One that is slow or fails loses what it does
    not take, which `Tracking.lost` counts and the log says once; training never waits.

    Parameters
    ----------
    trackers
        A `torch.utils.tensorboard.SummaryWriter`, an `mlflow.ActiveRun`, a `wandb.Run`, or a
        `Tracker` of your own.
    root
        Path or URL of the checkpointer's root, to which trackers refer.
    daemon, job
        URL of the daemon, or the job whose daemon runs on this machine. Without both there are no
        incidents and no goodput.
    period_s
        How often the daemon is asked.

    Raises
    ------
    UsageError
        This is no tracker.
    """
    asked = daemon is not None or job is not None
    return Tracking(
        [_tracker(t) for t in trackers],
        root if "://" in root else os.path.abspath(root),
        (lambda: connect(daemon, job)) if asked else None,
        period_s,
    )


def _tracker(given: Any) -> Tracker:
    library = type(given).__module__.partition(".")[0]
    if library == "mlflow":
        return _MlFlow(given)
    if library == "wandb":
        return _WandB(given)
    if hasattr(given, "add_scalar"):
        return _TensorBoard(given)
    if all(hasattr(given, name) for name in ("number", "text", "checkpoint")):
        return cast(Tracker, given)
    raise UsageError(
        "unknown kind of tracker",
        wanted="a SummaryWriter, an mlflow.ActiveRun, a wandb.Run, or a Tracker",
        found=type(given).__name__,
    )
