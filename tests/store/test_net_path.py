"""Somebody between a store's server and its client: no wrong byte, nothing read, and an end."""

from __future__ import annotations

import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ckptd.base.net.address import Address, parse_server
from ckptd.errors import CkptdError
from ckptd.store.base import StoreSpec
from ckptd.store.memory import MemoryStore
from ckptd.store.net import Limits, StoreServer, new_secret
from tests.onpath import ACTS, OnPath
from tests.processes import PATIENCE_S

DATA = b"these are weights, " * 16_000
"""Some 300 kB: several reads of a socket, and tens of TLS records."""
WAIT_S = 0.3
"""For what never comes."""


@contextmanager
def path(wait_s: float = WAIT_S) -> Iterator[tuple[OnPath, StoreServer, MemoryStore, StoreSpec]]:
    memory = MemoryStore(uuid.uuid4().hex)
    limits = Limits(greeting_s=wait_s, idle_s=PATIENCE_S, frame_s=wait_s)
    with StoreServer(memory, secret=new_secret(), limits=limits) as server:
        target = parse_server(server.url)
        assert isinstance(target, Address)
        between = OnPath(target)
        options = server.describe().options
        options |= {"retry_s": 0.0, "connect_s": wait_s, "answer_s": wait_s}
        try:
            yield between, server, memory, StoreSpec(f"ckptd://{between.address}", options)
        finally:
            server.close()
            between.close()


def meddle(rounds: int, seed: int) -> dict[str, int]:
    """Have transfers meddled with; each ends in time, in an error or as if nothing had been."""
    dice = random.Random(seed)
    counts: dict[str, int] = dict.fromkeys(("whole", "refused", "meddled"), 0)
    with path() as (between, _, memory, spec):
        between.dice = random.Random(seed + 1)
        memory.put("there", DATA)
        for number in range(rounds):
            reads = dice.random() < 0.7
            # The bulk goes one way; the handshake, questions and answers both.
            bulk = dice.random() < 0.7
            at = dice.randrange(len(DATA) if bulk else 2000)
            act = dice.choice(ACTS) if dice.random() < 0.9 else None
            before = between.done
            between.plan = (act, reads if bulk else dice.random() < 0.5, at)
            began = time.monotonic()
            with spec.open() as store:
                try:
                    counts[one(store, memory, reads, number)] += 1
                except CkptdError:
                    counts["refused"] += 1
            assert time.monotonic() - began < PATIENCE_S
            counts["meddled"] += between.done - before
            between.plan = None
        assert b"weights" not in between.seen
        assert bytes.fromhex(spec.options["secret"]) not in between.seen
    return counts


def one(store: Any, memory: MemoryStore, reads: bool, number: int) -> str:
    """Transfer, and compare all that could have been believed."""
    if reads and number % 2:
        assert store.get("there") == DATA
    elif reads:
        room = bytearray(len(DATA))
        store.read_into("there", 0, memoryview(room))
        assert room == DATA
    else:
        key = f"put {number}"
        try:
            if number % 2:
                store.put(key, DATA)
            else:
                with store.writer(key, len(DATA)) as writer:
                    writer.write(DATA)
                    writer.commit()
        finally:
            # The answer may be what was lost.
            assert not memory.exists(key) or memory.get(key) == DATA
    return "whole"


def test_transfers_that_are_meddled_with_end_and_are_never_wrong() -> None:
    counts = meddle(60, 3)
    assert counts["meddled"] > 30
    assert counts["refused"] > 20


@pytest.mark.long
def test_transfers_that_are_meddled_with_for_long(report: Callable[[str], None]) -> None:
    seed = secrets.randbits(32)
    counts = meddle(600, seed)
    report(f"seed {seed}: {counts}")
    assert counts["meddled"] > 300
    assert counts["refused"] > 200


def test_what_passes_is_not_the_data() -> None:
    """At the version before, an attacker found the weights in it, and put others in their place."""
    with path(PATIENCE_S) as (between, _, memory, spec):
        memory.put("there", DATA)
        with spec.open() as store:
            assert store.get("there") == DATA
            store.put("new", DATA)
        assert memory.get("new") == DATA
        assert len(between.seen) > 2 * len(DATA)
        assert b"weights" not in between.seen
        assert b"there" not in between.seen  # nor what is asked for
