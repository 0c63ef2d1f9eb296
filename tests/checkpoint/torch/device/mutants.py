"""Our own code with one thing broken at a time: do the tests on simulated devices notice?

``.venv/bin/python -m tests.checkpoint.torch.device.mutants [NUMBER...]`` prints a table; it ends
with status 1 where a mutant survives that is not known to mean the same.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from ckptd.errors import CkptdError, DeadlineError
from tests.simdevice import installed, run

__all__ = ["MUTANTS", "Mutant", "mutated_source"]

ROOT = Path(__file__).resolve().parents[4]
DEADLINE_S, FUZZ_S = 90.0, 300.0
"""Seconds that a hunt gets, without the fuzz and with it: what hangs is noticed by that."""
PROGRAMS = 60


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module of `ckptd.checkpoint.torch`.

    Attributes
    ----------
    what
        What is broken.
    old, new
        Text that stands once in the module, and what takes its place.
    hunts
        What has a chance to notice, the best one first: names of checks, programs of `saving`,
        tests of `test_feed` and `test_host_side`, or ``fuzz``.
    same
        Why nothing can notice; empty where something must.
    """

    what: str
    module: str
    old: str
    new: str
    hunts: tuple[str, ...]
    same: str = ""


A_STEP = "a_step_waits_on_the_device_alone"
AVERAGES = "averages_may_change_at_once"
UNLOCKED = "a_slot_that_cannot_be_locked_is_filled_through_buffers"
ORDER = "        self._kind.current_stream(self.device).wait_event(self._last)\n"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "copies do not wait for what made the state",
        "ondevice",
        "        self._stream.wait_event(ready)\n",
        "        pass\n",
        (A_STEP, "fuzz"),
    ),
    Mutant(
        "the copies wait for an event of their own stream",
        "ondevice",
        "        ready.record(self._kind.current_stream(self.device))\n",
        "        ready.record(self._stream)\n",
        (A_STEP, "fuzz"),
    ),
    Mutant(
        "what changes the state does not wait for the copies",
        "ondevice",
        ORDER,
        "        pass\n",
        (A_STEP, "fuzz"),
    ),
    Mutant(
        "the default stream waits at the gate, not the current one",
        "ondevice",
        ORDER,
        ORDER.replace("_kind.current_stream(", "_kind.module.default_stream("),
        ("before_mutation_orders_the_current_stream", "fuzz"),
    ),
    Mutant(
        "a group counts as copied when it is enqueued",
        "ondevice",
        "        if not self.event.query():\n            return False\n",
        "",
        (A_STEP, "fuzz"),
    ),
    Mutant(
        "what may change at once is not cloned",
        "ondevice",
        "[p.clone(memory_format=torch.contiguous_format) for p in parts()]",
        "[p.detach() for p in parts()]",
        (AVERAGES, "fuzz"),
    ),
    Mutant(
        "clones are let go once the gate has ordered the streams",
        "ondevice",
        "            lane.order()\n",
        "            lane.order()\n        self._clones.clear()\n",
        (AVERAGES, "fuzz"),
        same="everything is pushed by then, and the stream that gets their memory waits first",
    ),
    Mutant(
        "a clone is let go when its copy is enqueued",
        "ondevice",
        "[self._clones[number] for number in numbers]",
        "[self._clones.pop(number) for number in numbers]",
        (AVERAGES, "fuzz"),
    ),
    Mutant(
        "a buffer is given back before the copy to it is done",
        "ondevice",
        "        buffer = buffers.take()\n",
        "        buffer = buffers.take()\n        buffers.give(buffer)\n",
        (UNLOCKED, "fuzz"),
    ),
    Mutant(
        "the gate orders the streams behind the group before the last",
        "ondevice",
        "            self._last = self._kind.make_event()\n"
        "            self._last.record(self._stream)\n"
        "        return _Copied(self._last, after)\n",
        "            earlier, self._last = self._last, self._kind.make_event()\n"
        "            self._last.record(self._stream)\n"
        "        last, self._last = self._last, earlier or self._last\n"
        "        return _Copied(last, after)\n",
        (A_STEP, "a_replay_that_asks_waits_on_the_device", "fuzz"),
    ),
    Mutant(
        "copies run on the stream that is current in the thread",
        "ondevice",
        "with self._kind.on_stream(self.device, self._stream), torch.no_grad():",
        "with self._kind.on(self.device), torch.no_grad():",
        (A_STEP, "fuzz"),
    ),
    Mutant(
        "what hurries leaves the pushing to the copying thread",
        "feed",
        "                while line.lane.free and line.waiting and self._error is None:\n",
        "                while False:\n",
        ("test_a_hurry_before_the_feeding_thread_pushes_all",),
    ),
    Mutant(
        "the gate opens before everything is pushed",
        "feed",
        "return self._change.wait_for(lambda: self._is_over() and not self._pushing, timeout_s)",
        "return True",
        ("test_a_lane_that_is_not_free_is_waited_for", "fuzz"),
    ),
    Mutant(
        "a slot is unlocked while copies to it are under way",
        "ondevice",
        "            if not self._users:\n                self._unlock()\n                return\n",
        "            self._unlock()\n            return\n",
        ("leave_with_copies_under_way",),
    ),
    Mutant(
        "a slot that was closed meanwhile is never unlocked",
        "ondevice",
        "                self._left.discard(self)\n                self._unlock()\n",
        "                self._left.discard(self)\n",
        ("leave_with_copies_under_way",),
    ),
    Mutant(
        "a closed slot that is locked loses its memory",
        "ondevice",
        "            self._mapped = None if slot is None else np.frombuffer("
        "slot.data, dtype=np.uint8)\n            self._left.add(self)\n",
        "            self._left.add(self)\n",
        ("leave_with_copies_under_way",),
        same="each lane holds a view of the slot until its copies are done",
    ),
    Mutant(
        "what used a slot is never counted off",
        "ondevice",
        "        self._shared.pins.use(self._slot, -1)\n",
        "        pass\n",
        ("page_locked_memory_is_given_back",),
    ),
    Mutant(
        "replays are not looked for",
        "ondevice",
        "            self._same = lane.fetch(now == self._before)\n",
        "            pass\n",
        ("a_replay_that_does_not_ask_is_found",),
    ),
    Mutant(
        "replays are looked for before the copies",
        "ondevice",
        "        self.groups.append(CopyGroup(lane, (), last))\n",
        "        self.groups.insert(0, CopyGroup(lane, (), last))\n",
        ("replay_between_the_copies",),
    ),
    Mutant(
        "the gate goes through lanes that the copying thread lets go",
        "ondevice",
        "for lane in list(self._lanes.values()):",
        "for lane in self._lanes.values():",
        ("save_and_step",),
    ),
    Mutant(
        "without memory for clones nothing is copied at once",
        "ondevice",
        "CopyFeed(self._steps, early, lambda front: None).run(timeout_s)",
        "pass",
        (AVERAGES, "fuzz"),
    ),
    Mutant(
        "no memory for clones fails the save",
        "ondevice",
        "        return [p.clone(memory_format=torch.contiguous_format) for p in parts()]\n"
        "    except torch.OutOfMemoryError:\n",
        "        return [p.clone(memory_format=torch.contiguous_format) for p in parts()]\n"
        "    except ZeroDivisionError:\n",
        ("fuzz",),
    ),
    Mutant(
        "a save inside a capture goes on",
        "saver",
        "            if is_capturing():\n                raise captured(",
        "            if False:\n                raise captured(",
        ("a_save_inside_a_capture_is_refused",),
    ),
    Mutant(
        "what lies between packed tensors is not put back",
        "ondevice",
        "                self._bytes[at] = values\n",
        "                pass\n",
        ("fuzz",),
    ),
    Mutant(
        "tensors are packed over bytes that are not in place yet",
        "ondevice",
        " and all(map(is_placed, between))",
        "",
        ("fuzz",),
    ),
    Mutant(
        "the wait of a capture is in the capture",
        "gate",
        "        if self._on_device is not None and is_capturing():\n            return",
        "        if False:\n            return",
        ("of_cuda",),
    ),
    Mutant(
        "what torch counts as changed is not looked at",
        "copy",
        "changed += [name] if now[of] != self._versions[of] else []",
        "pass",
        ("a_change_behind_the_first_bytes_is_named",),
    ),
    Mutant(
        "the gate does not look at what has changed by then",
        "copy",
        "        self._changes()\n        on_device.order()\n",
        "        on_device.order()\n",
        (A_STEP,),
    ),
    Mutant(
        "the host waits at the gate in the streams' place",
        "saver",
        "give_up, snapshot if ",
        "give_up, None if ",
        (A_STEP,),
    ),
    Mutant(
        'with lazy="off" save returns before everything is copied',
        "saver",
        '        if self._options.lazy == "off":\n            self.gate.settle()\n',
        "",
        ("off_copies_before_it_returns",),
    ),
    Mutant(
        "nothing is cloned",
        "saver",
        'clone=self._options.lazy != "off"',
        "clone=False",
        (AVERAGES, "fuzz"),
    ),
    Mutant(
        "memory that was made again is not looked for",
        "copy",
        "(self._live.among(resized) if resized else [])",
        "[]",
        ("make_again_on_host_and_device",),
    ),
)


def mutated_source(mutant: Mutant) -> str:
    """Return the source of a mutant's module, broken."""
    source = (ROOT / "ckptd/checkpoint/torch" / f"{mutant.module}.py").read_text()
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.what}: its text stands {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


class _Loader(SourceFileLoader):
    """Imports a module from other text than its file has."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Finder:
    """Finds one module with a mutant's text."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = f"ckptd.checkpoint.torch.{mutant.module}"
        path = str(ROOT / "ckptd/checkpoint/torch" / f"{mutant.module}.py")
        self._spec = importlib.util.spec_from_file_location(
            self._name, path, loader=_Loader(self._name, path, mutated_source(mutant))
        )

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return self._spec if name == self._name else None


def hunted(number: int, folder: str) -> str:
    """Break the code of this process, and hunt; return what noticed, or nothing."""
    mutant = MUTANTS[number]
    if any(name.startswith("ckptd.checkpoint.torch") for name in sys.modules):
        raise LookupError("ckptd.checkpoint.torch is imported already")
    sys.meta_path.insert(0, _Finder(mutant))
    for name, hunt in _hunts(mutant.hunts, folder):
        found = hunt()
        if found:
            raised = re.findall(r"^(?:\w+\.)*\w*Error\b.*", found, re.MULTILINE)
            return f"{name}: {(raised or [found])[-1][:90]}"
    return ""


def _hunts(names: Sequence[str], folder: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield what a name stands for, under one schedule after the other."""
    from tests.checkpoint.torch import cuda_checks, test_feed
    from tests.checkpoint.torch.device import fuzz, saving, test_host_side
    from tests.simulated import failing

    def check(name: str, schedule: str) -> str:
        cuda_checks.make_small()
        root = f"memory://{name}-{schedule}"
        return next(
            iter(failing({name: lambda _: cuda_checks.CHECKS[name](root)}, schedule).values()), ""
        )

    def programs(first: int) -> str:
        _, faults = fuzz.fuzz(first, seconds=FUZZ_S, programs=5, root="memory://mutant")
        return faults[0] if faults else ""

    for name in names:
        if name == "fuzz":
            for first in range(1, PROGRAMS, 5):
                yield "fuzz", lambda first=first: programs(first)  # type: ignore[misc]
        elif name in cuda_checks.CHECKS:
            for schedule in ("lazy", "starve:main", "random:3", "eager", "starve:side"):
                yield f"{name}, {schedule}", lambda n=name, s=schedule: check(n, s)  # type: ignore[misc]
        elif name == "of_cuda":
            yield name, lambda: next(iter(failing(saving.OF_CUDA, "lazy").values()), "")
        elif name == "leave_with_copies_under_way":
            yield name, lambda: _raised(test_host_side.leave_with_copies_under_way, folder)
        elif name == "replay_between_the_copies":
            yield name, lambda: test_host_side.replay_between_the_copies().replace("mutated", "")
        elif name == "make_again_on_host_and_device":
            yield (
                name,
                lambda: ", ".join(
                    found
                    for found in test_host_side.make_again_on_host_and_device()
                    if found == "saved"
                ),
            )
        elif name == "save_and_step":
            yield name, _raced
        else:
            yield name, lambda n=name: _raised(getattr(test_feed, n))  # type: ignore[misc]


def _raced() -> str:
    from tests.checkpoint.torch.device import test_host_side

    with installed().test("eager", 7):
        return ", ".join(test_host_side.save_and_step(7))


def _raised(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001 - whatever notices
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(number: int, folder: str) -> str:
    """Hunt a mutant in a process of its own; return what noticed, or nothing."""
    try:
        limit = DEADLINE_S + FUZZ_S * ("fuzz" in MUTANTS[number].hunts)
        return run(hunted, number, folder, deadline_s=limit)
    except CkptdError as error:
        if isinstance(error, DeadlineError):
            return "hangs"
        return f"{type(error).__name__}: {error.message}"
    except AssertionError as error:  # problems that the simulator has found
        return f"simulator: {error}"


def main() -> int:
    """Hunt all mutants, or those that are named; print a row of the table for each."""
    import tempfile

    wanted = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    survived = 0
    for number in wanted:
        mutant, begun = MUTANTS[number], time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            seen = outcome(number, folder)
        if not seen and not mutant.same:
            survived += 1
        if seen and mutant.same:
            seen = f"NOT THE SAME: {seen}"
            survived += 1
        verdict = seen or (f"means the same: {mutant.same}" if mutant.same else "SURVIVED")
        seconds = time.monotonic() - begun
        print(
            f"| {number} | {mutant.module}: {mutant.what} | {verdict} | {seconds:.0f} s |",
            flush=True,
        )
    return bool(survived)


if __name__ == "__main__":
    # Under its own name, so that processes find what they are to call.
    from tests.checkpoint.torch.device.mutants import main as named

    sys.exit(named())
