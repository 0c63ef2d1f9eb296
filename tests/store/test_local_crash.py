"""SIGKILL before and after every system call of a put and of a writer, in real processes.

What survives is read by a new process' store: the object is whole, or it is not there (or still the
old one); nothing else is listed; the same call works afterwards; a sweep removes what is left.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd.store import FaultRule, FaultSpec, StoreSpec
from ckptd.store.base import Store
from ckptd.testing.store import pattern
from tests.processes import PATIENCE_S
from tests.programs import zygote
from tests.store.places import refuse_link, skip_without_disk

OLD = b"old"
SMALL = pattern(5000)
BIG = pattern((20 << 18) + 5)
BLOCKS = {"block_bytes": 8 << 18}
"""As many blocks as 20 MiB are of the default's."""


def put(store: Store) -> None:
    store.put("deep/folder/key", SMALL)


def put_new(store: Store) -> None:
    store.put("deep/folder/key", SMALL, create_only=True)


def put_new_without_links(store: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse_link)
        put_new(store)


def writer(store: Store) -> None:
    with store.writer("deep/folder/key", len(BIG)) as out:
        out.write(memoryview(BIG)[:100])
        out.write(memoryview(BIG)[100:])
        out.commit()
    store.sync("deep/folder/")


def delete(store: Store) -> None:
    store.delete(["deep/folder/key"])


ACTS: dict[str, Callable[[Store], None]] = {
    "put": put,
    "put_new": put_new,
    "put_new_without_links": put_new_without_links,
    "writer": writer,
    "delete": delete,
}


def act_in_child(spec: bytes, act: str) -> None:
    ACTS[act](StoreSpec.from_json(spec).open())


@pytest.fixture
def run_child() -> Callable[[StoreSpec, str], int | None]:
    def run(spec: StoreSpec, act: str) -> int | None:
        child = zygote().Process(target=act_in_child, args=(spec.to_json(), act))
        child.start()
        child.join(PATIENCE_S)
        if child.exitcode is None:
            child.kill()
        return child.exitcode  # type: ignore[no-any-return]

    return run


def check(root: Path, act: str, before: bytes | None, step: str) -> bool:
    """Check what a killed `act` left; returns whether it had taken effect."""
    key, wanted = "deep/folder/key", BIG if act == "writer" else SMALL
    with StoreSpec(str(root), BLOCKS).open() as store:
        names = [o.key for o in store.list()]
        assert names in ([], [key]), step
        found = store.get(key) if names else None
        if act == "writer":
            # Whole or partial: a reader learns of it from a commit record only.
            assert found is None or len(found) in (0, len(wanted)), step
        elif act == "delete":
            assert found in (OLD, None), step
        else:
            assert found in (before, wanted), step
        effect = found != before
        if act.startswith("put_new") and found == wanted:
            store.delete([key])
        ACTS[act](store)
        assert store.exists(key) == (act != "delete"), step
        store.sweep(older_than_s=0)
    left = [p.name for p in root.rglob("~*")]
    assert left == [], step
    return effect


@pytest.mark.parametrize(
    ("act", "there"),
    [
        ("put", False),
        ("put", True),
        ("put_new", False),
        ("put_new_without_links", False),
        ("writer", False),
        ("delete", True),
    ],
)
def test_sigkill_at_every_system_call(
    tmp_path: Path,
    act: str,
    there: bool,
    run_child: Callable[[StoreSpec, str], int | None],
    report: Callable[[str], None],
) -> None:
    if act == "put_new_without_links":
        skip_without_disk(tmp_path)
    before = OLD if there else None

    def prepare(name: str) -> StoreSpec:
        spec = StoreSpec(str(tmp_path / name), BLOCKS)
        if there:
            with spec.open() as store:
                store.put("deep/folder/key", OLD)
        return spec

    log = tmp_path / "log"
    dry = prepare("dry").wrapped(FaultSpec(inner=True, log=str(log)))
    assert run_child(dry, act) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    effects = []
    for number in range(1, len(lines) + 1):
        spec = prepare(str(number))
        rule = FaultRule("kill", number=number)
        killed = spec.wrapped(FaultSpec((rule,), inner=True, log=str(tmp_path / f"log{number}")))
        assert run_child(killed, act) == -signal.SIGKILL
        step = f"{act}: step {number}, {lines[number - 1]['op']}"
        effects.append(check(tmp_path / str(number), act, before, step))
    print(
        f"{act}: killed at {len(lines)} steps, took effect from step {effects.index(True) + 1} on"
    )
    assert effects[0] is False
    assert effects == sorted(effects), "an effect that shows once does not vanish at a later kill"
