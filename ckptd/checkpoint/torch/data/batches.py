"""`Batches`: position in a loader or function, exact resume, random streams, workers, prefetch.

In it: loaders whose state fits one number of workers; hint for data that changed; when skipped
batches are logged.

What makes batches draws from random streams: a loader that is iterated draws a seed for its
workers and one for its shuffle, a function draws the indexes. Drawn from the global streams that
would depend on dropout and evaluations, and an iterator made after a load would shift the streams
that the load has just set. So batches are made with streams of their own, and these are part of
the position.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckptd.base.runtime.ownership import OfOneProcess, one_at_a_time
from ckptd.checkpoint.torch.data.facts import (
    batch_digest,
    batch_form,
    batches_of,
    changes,
    facts_of,
    saved_digest,
)
from ckptd.checkpoint.torch.data.keyed import keyed_seed
from ckptd.checkpoint.torch.data.sampler import ElasticSampler, rank_and_world
from ckptd.checkpoint.torch.state.leaves import derive_seed
from ckptd.checkpoint.torch.state.rng import OwnStreams, RngStreams
from ckptd.errors import CorruptError, MismatchError, UsageError

_log = logging.getLogger("ckptd")
_Kind = Literal["function", "loader", "stateful", "elastic"]
_LONG = 100
"""Batches that are made only to be thrown away, from which on the log says so."""


@dataclass(frozen=True, slots=True, eq=False)
class _Position:
    """Where the data is.

    Attributes
    ----------
    drawn
        Batches since the job began.
    epoch
        Epochs that have ended; the number of the one under way.
    taken
        Batches of the epoch under way; None between epochs.
    seed, streams
        Of the streams of its own: as they are, or for a plain loader as the epoch began. None
        before the first batch.
    generators
        Those of the loader and its samplers, as `streams`.
    reused
        Whether the epoch went on with an iterator whose workers an epoch before had started.
    inner
        What a stateful loader told.
    last
        A digest of the last batch of a plain loader; empty where it has none.
    """

    drawn: int = 0
    epoch: int = 0
    taken: int | None = None
    seed: int | None = None
    streams: RngStreams | None = None
    generators: tuple[bytes, ...] = ()
    reused: bool = False
    inner: Any = None
    last: str = ""


class Batches(OfOneProcess):
    """The batches of a loader or of a function, and where the job is among them.

    Put it into the state and take batches from it::

        data = ckptd.Batches(loader)  # or ckptd.Batches(make_batch)
        state = {"model": model, "optim": optimizer, "data": data, "rng": ckptd.Rng()}
        start = ck.load(state) if ck.latest() is not None else 0
        for step in range(start + 1, total + 1):
            train(next(data))
            ck.save(step, state)

    ``next(data)`` goes on with the next epoch by itself. ``for batch in data`` is one epoch; after
    a load the first such loop is what is left of the epoch that was under way, which may be
    nothing. It does not matter whether a loop began before the load or after it. Where sampler,
    data set or loader have a ``set_epoch``, it is called with `epoch` as each epoch begins.

    Batches are made with random streams of their own: neither dropout nor an evaluation changes
    which batch comes, and making an iterator shifts no other stream. The position is per rank.

    How a loader comes back to its position: one with ``state_dict`` and ``load_state_dict``
    (torchdata's ``StatefulDataLoader``) is asked; of any other, the epoch is begun as it was begun
    and the batches that were taken are made again and thrown away, which takes their time. One
    with an `ckptd.elastic.ElasticSampler` goes where the sampler is, which belongs into the state.

    Parameters
    ----------
    source
        An iterable that can be iterated again and again, such as a `torch.utils.data.DataLoader`,
        or a function without arguments that returns a batch: ``lambda: get_batch("train")``. A
        function draws from the global streams of torch, numpy and Python, and depends on nothing
        else that changes.
    ahead
        Batches that the program has taken and not trained on yet when it saves, always as many.
        The position is then so many batches back: the program takes them again when it
        starts. 1 for a loop that fetches the next batch during the step.
    refetch
        False: batches of a `torch.utils.data.DataLoader` that were taken are skipped by their
        indexes, without being made. Exact where samples draw nothing from global streams.

    Attributes
    ----------
    source
        As given; further attributes are looked up there.

    Raises
    ------
    UsageError
        Neither a function nor an iterable, or an iterator.
    """

    def __init__(
        self, source: Iterable[Any] | Callable[[], Any], *, ahead: int = 0, refetch: bool = True
    ) -> None:
        if type(ahead) is not int or ahead < 0:
            raise UsageError(
                "ahead= must be a number", wanted="an int, at least 0", found=repr(ahead)
            )
        self.source = source
        self._kind = _kind_of(source)
        self._call: Callable[[], Any] = source if callable(source) else _no_function
        self._ahead = ahead
        self._refetch = refetch
        self._at = _Position()
        self._streams: OwnStreams | None = None
        self._inner: Iterator[Any] | None = None
        self._turn: object = None
        self._goes_on = False
        self._led_back = False
        self._outside: list[RngStreams] = []
        self._form: str | None = None
        self._changed = False
        self._marks: deque[_Position] = deque(maxlen=ahead)
        self._since_load = 0
        self._pace = _Pace(ahead)
        self._began = False
        if self._kind != "function":
            watch_workers(source, stateful=self._kind == "stateful")

    def _leave_to_parent(self) -> None:
        # Before an iterator is made a child may have it: what begins there has its own workers.
        # After that both would take batches of the same workers, and neither would get all.
        if vars(self).get("_began"):
            super()._leave_to_parent()
            inner: Any = getattr(self._inner, "_rest", self._inner)
            for iterator in (inner, *(getattr(p, "_iterator", None) for p in _parts(self.source))):
                if hasattr(iterator, "_shutdown"):
                    # Or torch would end the workers as a child collects it.
                    iterator._shutdown = True

    # -- taking batches --------------------------------------------------------------------------

    @one_at_a_time
    def __next__(self) -> Any:
        """Return the next batch; epochs follow one another.

        Raises
        ------
        StopIteration
            An epoch has no batch.
        MismatchError
            No batch comes where the data was when it was saved.
        """
        return self._next(2)

    def _next(self, epochs: int) -> Any:
        led_back = self._led_back and epochs > 1
        with self._drawing():
            if self._kind == "function":
                return self._took(self._call())
            for _ in range(epochs):
                if (batch := next(self._epoch_on(), _END)) is not _END:
                    return self._took(batch)
                self._end_epoch()
        if led_back:
            raise _ended("no batch", self._at.epoch)
        raise StopIteration

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over one epoch, or without end for a function."""
        return _Turn(self)

    def __len__(self) -> int:
        """Batches of an epoch, as the loader says."""
        return len(self.source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def epoch(self) -> int:
        """Epochs that have ended: the number of the one under way, from 0."""
        return self._at.epoch

    @property
    def drawn(self) -> int:
        """Batches taken since the job began, in earlier lives too."""
        return self._at.drawn

    @one_at_a_time
    def _turn_next(self, turn: object, first: bool) -> Any:
        if self._kind == "function":
            return self._next(1)
        if first:
            self._turn = turn
            if self._at.taken is not None and not self._goes_on:
                self._end_epoch()
        elif turn is not self._turn:
            raise UsageError(
                "this loop over the batches has ended: a later one was started",
                hint="create another Batches for a second loop over the same data",
            )
        return self._next(1)

    def _took(self, batch: Any) -> Any:
        at = self._at
        last = batch_digest(batch) if self._kind == "loader" else ""
        if self._kind == "function":
            self._look_at(batch_form(batch))
        self._at = replace(at, drawn=at.drawn + 1, taken=(at.taken or 0) + 1, last=last)
        self._since_load += 1
        self._goes_on = False
        return batch

    def _look_at(self, form: str) -> None:
        """Warn where a function goes on with batches of another form than all that it made."""
        if self._led_back and self._form and form != self._form:
            _log.warning(
                "batches were %s when the position was saved, and are %s: this resume is not exact "
                "(docs/guide/exact-resume.md)",
                self._form,
                form,
            )
        self._led_back = False
        self._form = form if self._form in (None, form) else ""

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Use the random streams of these batches within the context."""
        if self._outside:
            self._outside.pop().set()
        own = self._own()
        if self._ahead:
            self._marks.append(self._now())
        with own.in_use():
            yield

    def _own(self) -> OwnStreams:
        if self._streams is None:
            self._streams = OwnStreams.fork()
        return self._streams

    def _epoch_on(self) -> Iterator[Any]:
        """Return what is left of the epoch; begin it, or go where a load left off."""
        if self._inner is None:
            self._inner = self._opened()
        return self._inner

    @one_at_a_time
    def end_epoch(self) -> None:
        """End the epoch under way, if there is one: what is left of it is not taken.

        For loops that count the batches and do not ask whether there is another: between their
        epochs the position is then the begin of the next one.
        """
        if self._at.taken is not None and self._kind != "function":
            if self._kind == "stateful":
                with self._drawing():  # only then its own state is that of an epoch that ended
                    next(self._epoch_on(), _END)
            self._end_epoch()
        self._marks.clear()

    def _end_epoch(self) -> None:
        self._inner = None
        self._goes_on = False
        self._at = replace(self._at, epoch=self._at.epoch + 1, taken=None)

    def _opened(self) -> Iterator[Any]:
        self._began = True
        at, source = self._at, self.source
        _set_epoch(source, at.epoch)
        if self._kind == "loader":
            if self._led_back:
                _as_begun(source, at)
            if at.taken is None:
                # The global streams are those of these batches here.
                at = replace(at, **_begin(source), streams=RngStreams.now(), seed=self._seed())
        led_back, self._led_back = self._led_back, False
        skip = at.taken or 0 if self._kind == "loader" else 0
        self._at = replace(at, taken=at.taken or 0)
        if skip >= _LONG and self._refetch:
            what = "%d batches are fetched again to reach the saved position; refetch=False or a "
            what += "loader with state_dict() takes less (docs/guide/exact-resume.md)"
            _log.warning(what, skip)
        if skip and not self._refetch and isinstance(source, torch.utils.data.DataLoader):
            return _without_first(source, skip)
        if self._kind != "loader":
            # How often the making of an iterator draws depends on whether it was led back.
            if led_back and self._kind == "stateful":
                source.state_dict()  # type: ignore[union-attr]
            _after_opening(self._own(), at).set()
        inner = iter(source)  # type: ignore[arg-type]
        if self._kind != "loader":
            _after_opening(self._own(), at).set()
        batch: Any = None
        for _ in range(skip):
            if (batch := next(inner, _END)) is _END:
                raise _ended(f"fewer than {skip} batches", at.epoch)
        if skip and at.last and at.last != batch_digest(batch) and not self._changed:
            _log.warning(
                "batches differ when they are fetched again, so this resume is not exact: the data "
                "has other samples, or the loader draws from a random stream that ckptd does not "
                "know (docs/guide/exact-resume.md)"
            )
        return inner

    def _seed(self) -> int | None:
        return None if self._streams is None else self._streams.seed

    # -- state -----------------------------------------------------------------------------------

    def _now(self) -> _Position:
        at = self._at
        if self._kind == "loader" and at.taken is not None:
            return at
        inner = at.inner
        if self._kind == "stateful" and not self._led_back:
            with self._own().in_use():  # it may make an iterator for this
                inner = self.source.state_dict()  # type: ignore[union-attr]
        streams = None if self._streams is None else self._streams.at
        begin = _begin(self.source) if self._kind == "loader" and not self._led_back else {}
        return replace(at, **begin, seed=self._seed(), streams=streams, inner=inner)

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the position: that of the first batch which is not trained on yet.

        Raises
        ------
        UsageError
            Kind ``under-way``: a batch is being made, in the call below a signal handler or in
            another thread: global random streams are those of the batches then.
        """
        at = self._marks[0] if self._marks else self._now()
        return {
            "kind": self._kind,
            "drawn": at.drawn,
            "epoch": at.epoch,
            "taken": at.taken,
            "seed": at.seed,
            "streams": None if at.streams is None else at.streams.values(),
            "generators": list(at.generators),
            "reused": at.reused,
            "inner": at.inner,
            "last": at.last,
            "batch_size": _batch_size(self.source),
            "facts": self._facts(),
            "form": self._form or "",
        }

    @one_at_a_time
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position; loops over the batches that are under way go on from there.

        Raises
        ------
        MismatchError
            It is the position in another kind of data, or one that the data does not have.
        CorruptError
            `state` was not made by `state_dict`.
        """
        at = _position_of(state, self._kind)
        self._changed = self._compare(at, state.get("facts") or {})
        if self._since_load and self._ahead:
            _log.warning(
                "%d batches were taken before the load, and the program may still hold some of "
                "them: take the %d batches ahead after the load (docs/guide/exact-resume.md)",
                self._since_load,
                self._ahead,
            )
        if self._kind == "stateful" and at.inner is not None:
            self.source.load_state_dict(at.inner)  # type: ignore[union-attr]
        self._form = state.get("form") or None
        self._at = at
        self._streams = None if at.seed is None else OwnStreams(at.seed, at.streams)
        self._inner = None
        self._goes_on = at.taken is not None
        self._led_back = True
        self._marks.clear()
        self._since_load = 0

    def _facts(self) -> dict[str, Any]:
        if self._kind == "function":
            return {}
        return facts_of(self.source, _parts(self.source), workers=self._kind == "stateful")

    def _compare(self, at: _Position, saved: dict[str, Any]) -> bool:
        """Say whether this is other data than that of a position, what differs, and what is done.

        Raises
        ------
        MismatchError
            It has no such position.
        """
        if self._kind == "function":
            return False
        taken, found, size = at.taken or 0, changes(saved, self._facts()), batches_of(self.source)
        if found or (size is not None and taken > size):
            _set_epoch(self.source, at.epoch)  # order and length may follow from it
            found, size = changes(saved, self._facts()), batches_of(self.source)
        if taken and self._kind != "elastic" and size is not None and taken > size:
            raise _ended(
                f"{size} batches, {'; '.join(found)}", at.epoch, f"at least {taken} batches"
            )
        if not found:
            return False
        if at.inner is not None and _workers_fixed(self.source, saved):
            raise MismatchError(
                "the loader's own state is that of another number of workers",
                wanted=f"num_workers={saved['workers']}, as saved",
                found="; ".join(found),
                hint=_AS_SAVED,
            )
        _log.warning(
            "the data differs from that of the saved position: %s. The resume is not exact: %s "
            "(docs/guide/exact-resume.md)",
            "; ".join(found),
            self._done(at),
        )
        return True

    def _done(self, at: _Position) -> str:
        if self._kind == "elastic":
            return "the epoch goes on where the sampler is"
        if not at.taken:
            return f"epoch {at.epoch} begins with what is here now"
        if self._kind == "stateful":
            return f"the loader goes on by its own state, which is that after {at.taken} batches"
        return f"epoch {at.epoch} goes on after the first {at.taken} batches of what is here now"

    def saved(self, step: int) -> None:
        """Note that a save of `step` holds the position; warn where `ahead` cannot be right."""
        self._pace.saved(step, self._since_load)
        if step > self._pace.begin:
            self._outside.clear()  # a step was made since the load, and what it drew counts

    def loaded(self, step: int, streams: list[RngStreams]) -> None:
        """Note that all of `step` was loaded.

        Parameters
        ----------
        streams
            The global random streams, if they were loaded: they are set again when the first batch
            of all that share this list is taken, so that what the program draws until then shifts
            nothing.
        """
        self._pace = _Pace(self._ahead, step)
        self._outside = streams

    def shared_out(self, states: list[Any]) -> dict[str, Any]:
        """Return this rank's position, from those that another number of ranks saved.

        Raises
        ------
        MismatchError
            This rank's share cannot be told from the saved positions.
        """
        rank, world = rank_and_world()
        for state in states:
            _position_of(state, self._kind)
        own: dict[str, Any] = {**states[0], "drawn": max(s["drawn"] for s in states)}
        # Shares and batches follow from the number of ranks, of which the log says enough.
        facts = states[0].get("facts") or {}
        own["facts"] = {n: facts[n] for n in ("loader", "dataset", "order") if n in facts}
        if self._kind == "stateful" and any(s["inner"] is not None for s in states):
            raise _no_share(len(states), world, "the loader's own state is that of one rank")
        if self._kind == "loader" and any(s["taken"] for s in states):
            sizes = {s["batch_size"] for s in states} | {_batch_size(self.source)}
            if None in sizes:
                raise _no_share(len(states), world, "the loader has no batch_size")
            samples = sum((s["taken"] or 0) * s["batch_size"] for s in states)
            own["last"] = ""
            own["taken"] = samples // (world * int(_batch_size(self.source) or 1))
            _log.warning(
                "%d ranks shared the data and %d do now: the epoch resumes after the same number "
                "of samples, but some may repeat or be skipped (ckptd.elastic.ElasticSampler can)",
                len(states),
                world,
            )
        if len({s["seed"] for s in states}) > 1 and own["seed"] is not None:
            seeds = [s["seed"] for s in states]
            own["seed"] = derive_seed([seeds, own["drawn"]], rank, world)
            own["streams"] = RngStreams.of_seed(own["seed"]).values()
        return own


class _Turn:
    """A loop over the batches."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._first = True
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over and not self._batches._goes_on:
            raise StopIteration
        first, self._first, self._over = self._first, False, False
        try:
            return self._batches._turn_next(self, first)
        except StopIteration:
            self._over = True
            raise


class _Pace:
    """Finds from the saves how many batches a program takes ahead, if it takes them regularly."""

    def __init__(self, ahead: int, step: int = 0) -> None:
        self._ahead = ahead
        self.begin = step
        self._seen: list[tuple[int, int]] = []
        self._over = False

    def saved(self, step: int, drawn: int) -> None:
        """Note how many batches were taken at `step`, since the start or the load."""
        if self._over or (self._seen and step <= self._seen[-1][0]):
            return
        self._seen.append((step, drawn))
        (s1, d1), (s2, d2) = self._seen[0], self._seen[min(1, len(self._seen) - 1)]
        if (d2 - d1) * (step - s1) != (drawn - d1) * (s2 - s1):
            self._over = True  # not regularly
        elif len(self._seen) == 4:
            self._over = True
            self._look(step, drawn, step - s1, drawn - d1)

    def _look(self, step: int, drawn: int, steps: int, taken: int) -> None:
        each, rest = divmod(taken, steps)
        found = drawn - each * (step - self.begin)
        if rest or not each or not 0 <= found <= 64 or found == self._ahead:
            return
        _log.warning(
            "at each save this program has taken %d batches more than its steps need, and "
            "Batches(..., ahead=%d) says %d: a resume is not exact until it says ahead=%d "
            "(docs/guide/exact-resume.md)",
            found,
            self._ahead,
            self._ahead,
            found,
        )


_END = object()
_AS_SAVED = (
    "load with the loader or function that it was saved with, or leave the data out: "
    "ck.load(state, only=...)"
)


def _ended(found: str, epoch: int, wanted: str = "a batch there") -> MismatchError:
    return MismatchError(
        "the data ends before the batch that was saved",
        wanted=f"{wanted} in epoch {epoch}",
        found=found,
        hint=_AS_SAVED,
    )


def _workers_fixed(loader: Any, saved: dict[str, Any]) -> bool:
    """Tell whether a loader's state fits one number of workers, which is not the saved one."""
    its = any(kind.__module__.partition(".")[0] == "torchdata" for kind in type(loader).__mro__)
    return its and saved.get("workers") not in (None, getattr(loader, "num_workers", None))


def _no_function() -> Any:
    raise UsageError("the source of batches is a loader: iterate over it")


def _kind_of(source: Any) -> _Kind:
    if isinstance(source, Iterator):
        raise UsageError(
            "an iterator cannot be restarted, so its position cannot be restored",
            wanted="a loader, or a function that returns a batch",
            found=type(source).__name__,
            hint="pass to ckptd.Batches the loader that the iterator was made from",
        )
    if not hasattr(type(source), "__iter__"):
        if callable(source):
            return "function"
        raise UsageError(
            "the source of batches is not iterable",
            wanted="a loader, or a function that returns a batch",
            found=type(source).__name__,
        )
    if any(isinstance(s, ElasticSampler) for s in _parts(source)):
        return "elastic"
    both = all(callable(getattr(source, n, None)) for n in ("state_dict", "load_state_dict"))
    # accelerate's loaders have both functions also where the loader within has no state.
    return "stateful" if both and getattr(source, "use_stateful_dataloader", True) else "loader"


def _parts(loader: Any) -> list[Any]:
    """Return the loader, what it is made of, as far as it tells, and its data set."""
    names = ("sampler", "batch_sampler", "base_dataloader")
    found: dict[int, Any] = {}
    left = [loader]
    while left:
        part = left.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = part
            # Frameworks put samplers into samplers, to share batches out among ranks.
            left += [getattr(part, name, None) for name in names]
    data = getattr(loader, "dataset", None)
    return [*found.values(), *([] if data is None else [data])]


def _generators(loader: Any) -> list[torch.Generator]:
    names = ("generator", "synchronized_generator")
    found = [getattr(part, name, None) for part in _parts(loader) for name in names]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _set_epoch(loader: Any, epoch: int) -> None:
    for part in {id(part): part for part in _parts(loader)}.values():
        if callable(function := getattr(part, "set_epoch", None)):
            function(epoch)


def _batch_size(loader: Any) -> int | None:
    sizes = (
        getattr(p, "batch_size", None) for p in (loader, getattr(loader, "batch_sampler", None))
    )
    return next((size for size in sizes if isinstance(size, int)), None)


def _position_of(state: Any, kind: _Kind) -> _Position:
    try:
        saved, seed = state["kind"], state["seed"]
        numbers = (state["drawn"], state["epoch"], state["taken"] or 0, seed or 0)
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"counts {numbers}")
        # Checkpoints of before have neither.
        facts, form = state.get("facts") or {}, state.get("form") or ""
        if not (isinstance(facts, dict) and isinstance(form, str)):
            raise TypeError(f"facts {facts!r}, form {form!r}")
        streams = state["streams"]
        at = _Position(
            drawn=state["drawn"],
            epoch=state["epoch"],
            taken=state["taken"],
            seed=seed,
            streams=None if streams is None else RngStreams.of_values(streams),
            generators=tuple(bytes(raw) for raw in state["generators"]),
            reused=bool(state["reused"]),
            inner=state["inner"],
            last=saved_digest(str(state["last"])),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptError(
            "the saved position in the data cannot be read", found=repr(error)[:200]
        ) from error
    if saved != kind:
        raise MismatchError(
            "the saved position belongs to another kind of data",
            wanted=str(saved)[:40],
            found=kind,
            hint=_AS_SAVED,
        )
    return at


def _no_share(saved: int, world: int, found: str) -> MismatchError:
    return MismatchError(
        "the position in the data cannot be split over another number of ranks",
        wanted=f"{saved} ranks, as saved",
        found=f"{world} ranks; {found}",
        hint="ckptd.elastic.ElasticSampler resumes exactly on any number of ranks; "
        'ckptd.PerRank(data, on_change="drop") restarts the data',
    )


def _after_opening(own: OwnStreams, at: _Position) -> RngStreams:
    if at.taken is not None and at.streams is not None:
        return at.streams
    return RngStreams.of_seed(keyed_seed("epoch", own.seed, at.epoch))


def _begin(loader: Any) -> dict[str, Any]:
    """Return what else decides which batches come, if an epoch begins now."""
    states = tuple(g.get_state().numpy().tobytes() for g in _generators(loader))
    return {"generators": states, "reused": getattr(loader, "_iterator", None) is not None}


def _as_begun(loader: Any, at: _Position) -> None:
    """Put everything that a loader draws from where it was when the epoch began."""
    if at.reused and getattr(loader, "_iterator", None) is None:
        iter(loader)  # it draws a seed for its workers once, and keeps them
    elif not at.reused and getattr(loader, "_iterator", None) is not None:
        loader._iterator = None
    for generator, raw in zip(_generators(loader), at.generators, strict=False):
        generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    if at.streams is not None:
        at.streams.set()


class _Skipping:
    """The sampler of a loader, the first time without its first items."""

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        yield from islice(self._sampler, skip, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _without_first(loader: torch.utils.data.DataLoader[Any], skip: int) -> Iterator[Any]:
    """Return an iterator over a loader that leaves out its first batches unmade."""
    which = "sampler" if loader.batch_sampler is None else "batch_sampler"
    kept = getattr(loader, which)
    # A loader refuses another sampler, since it could give other data; this one gives the same.
    object.__setattr__(loader, which, _Skipping(kept, skip))
    try:
        inner = iter(loader)
        first = next(inner, _END)  # some loaders look at their sampler only now
    finally:
        object.__setattr__(loader, which, kept)
    return iter(()) if first is _END else _Joined(first, inner)


class _Joined:
    """An item, then those of an iterator."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self._first = [first]
        self._rest = rest

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._first.pop() if self._first else next(self._rest)


# -- random numbers that a worker draws where no resume can draw the same again -------------------
#
# A worker's streams begin at the seed of its loader's iterator. A loader that begins its epoch
# again and runs to its position draws all that was drawn; one that goes straight to its position,
# or whose workers outlive an epoch, does not.


def watch_workers(loader: Any, *, stateful: bool) -> None:
    """Have workers warn when samples draw from their global streams, where that cannot be resumed.

    Parameters
    ----------
    stateful
        Whether the loader goes to its position by itself.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    if not stateful and not loader.persistent_workers:
        return
    data = loader.dataset
    if isinstance(data, IterableDataset) and stateful and hasattr(data, "state_dict"):
        return  # it tells its own streams, or has none
    if not isinstance(loader.collate_fn, _Watching):
        loader.collate_fn = _Watching(loader.collate_fn)


class _Watching:
    """Collates as another function does, and looks whether samples have drawn."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate
        self._before: Any = None
        self._told = False

    def __call__(self, samples: Any) -> Any:
        if not self._told and get_worker_info() is not None:
            now = _fingerprint()
            if self._before is not None and now != self._before:
                self._told = True
                _log.warning(
                    "samples draw from the random streams of a worker, and a resume within an "
                    "epoch cannot draw the same: draw from ckptd.elastic.keyed_generator(seed, "
                    "epoch, index) instead (docs/guide/exact-resume.md)"
                )
        batch = self._collate(samples)
        self._before = _fingerprint() if not self._told else None
        return batch


def _fingerprint() -> tuple[bytes, Any, Any]:
    state: Any = np.random.get_state(legacy=True)
    numpy = (state[0], state[1].tobytes(), *state[2:])
    return torch.get_rng_state().numpy().tobytes(), numpy, random.getstate()
