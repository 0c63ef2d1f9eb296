"""Forks processes that decode for the first time in eight threads at once; says how they ended.

``python -m tests.first_decode COUNT``: run by `tests/test_decoding.py`. The interpreter has
imported the modules and has decoded nothing: a fork of it is as fresh as a new process, and takes
milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from ckptd.base.runtime.channel import SocketChannel
from ckptd.checkpoint.agent import node  # noqa: F401 - imports what an agent does
from ckptd.checkpoint.format.manifest import GridEntry, ObjectEntry, TensorEntry
from ckptd.checkpoint.format.records import Generation, Parent, decode_record, encode_record
from ckptd.checkpoint.save.commit import decode_plan
from ckptd.checkpoint.save.messages import RankPart, Request, SaveRequest
from ckptd.checkpoint.save.structure import SavePlan, Structure
from ckptd.decoding import msgpack_decoder
from ckptd.store import StoreSpec

THREADS = 8
Call = Callable[[], object]


class Inner(msgspec.Struct):
    """A part of `Late`."""

    numbers: list[int]


class Late(msgspec.Struct):
    """What no module has made a decoder for: a store's options, of a package that came later."""

    inner: Inner


def received(kind: object, message: msgspec.Struct) -> Call:
    """Return what receives a message over a channel of its own, of which each thread makes one."""

    def call() -> object:
        ours, theirs = socket.socketpair()
        SocketChannel(theirs, bytes).send(message)
        return SocketChannel(ours, kind).receive(5.0)

    return call


def calls() -> list[Call]:
    """Return what an agent with several ranks decodes in its threads when a job begins."""
    objects = (ObjectEntry("a", 1),)
    part = RankPart(0, "p", objects=objects).encode()
    save = SaveRequest(1, 1, "a", 1, "p", (), objects, {}, None, 1.0)
    spec = msgspec.json.encode(StoreSpec("/x"))
    tensors, runs = (TensorEntry("t", "float32", (1,), 0, 0),), ((0, 0, 1),)
    plan = SavePlan(1, (GridEntry((((1, 1),),)),), (runs,), tensors, ()).stamped()
    generation = encode_record(Generation(2, "x", Parent(1, 1), "", 1))
    late = msgspec.msgpack.encode(Late(Inner([1])))
    return [
        partial(RankPart.decode, part, "x"),
        received(Request, save),
        partial(decode_plan, msgspec.msgpack.encode(plan), "x"),
        partial(Structure.decode, Structure().encode()),
        partial(decode_record, generation, Generation, "x"),
        partial(StoreSpec.from_json, spec),
        lambda: msgpack_decoder(Late).decode(late),
    ]


def decode_at_once(all_calls: list[Call], number: int) -> int:
    """Make one of the calls in eight threads that start together; return how many raised."""
    sys.setswitchinterval(1e-6)  # as if all cores were busy: threads change within a call
    together = threading.Barrier(THREADS)
    failed: list[str] = []

    def run() -> None:
        together.wait()
        try:
            all_calls[number % len(all_calls)]()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted and shown
            failed.append(repr(error))

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.stderr.write(failed[0] + "\n")
    return len(failed)


def main() -> None:
    """Print how many forks ended how, as JSON: 0, the number that raised, or minus the signal."""
    found, made = Counter[int](), calls()
    for number in range(int(sys.argv[1])):
        pid = os.fork()
        if pid == 0:
            os._exit(decode_at_once(made, number))
        found[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
