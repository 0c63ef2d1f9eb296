"""Roots that vanish, are made anew, are another run's, or take no more bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import ckptd
from ckptd import events
from ckptd.checkpoint.format.records import Commit, Generation, decode_record, encode_record
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.errors import CkptdError, ConflictError, RefusedError, StoreError
from ckptd.store import open_store
from tests import programs
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.cli.running import Cli
from tests.processes import PATIENCE_S
from tests.servers import MOTO, s3_moto, s3_url

pytestmark = pytest.mark.usefixtures("writing_thread")

__all__ = ["s3_moto", "tmpfs"]

LONG_AGO = "2020-01-01T00:00:00.000Z"


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1 << 12,), float(step)), "step": step}


def saved(ck: ckptd.Checkpointer, step: int) -> None:
    handle = ck.save(step, state_of(step), force=True)
    assert handle is not None
    handle.durable(PATIENCE_S)


def refusal(ck: ckptd.Checkpointer, step: int) -> str:
    """Try to save; return the kind of what `durable` raises."""
    handle = ck.save(step, state_of(step), force=True)
    assert handle is not None
    with pytest.raises(CkptdError) as caught:
        handle.durable(PATIENCE_S)
    return caught.value.kind


def loaded(root: str) -> int:
    state = state_of(0)
    with ckptd.Checkpointer(root) as ck:
        step = ck.load(state)
    assert state["step"] == step
    assert bool((state["w"] == step).all())
    return step


def test_a_root_that_hides_a_model_begins_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for step in (1, 2):  # the second job finds the root: nothing is hidden anew
        with ckptd.Checkpointer(str(tmp_path)) as ck:
            if step == 2:
                ck.load(state_of(0))
            saved(ck, step)
    (said,) = [r.getMessage() for r in caplog.records if "hides" in r.message]
    assert said.startswith(f"{tmp_path} holds a checkpoint of the format torch")


def abandoned(ck: ckptd.Checkpointer) -> None:
    """Close what may have failed saves that nobody looked at."""
    try:
        ck.close()
    except CkptdError:
        ck.abandon()


TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "root alone": lambda _: {},
    "packed": lambda _: {"storage": ckptd.Storage(compress=1)},
    "memory": lambda _: {"tiers": [ckptd.Memory(agent_ttl_s=0.1)]},
    "memory and a folder": lambda p: {
        "tiers": [ckptd.Memory(agent_ttl_s=0.1), ckptd.Local(str(p / "node"))]
    },
}


@pytest.fixture(autouse=True)
def _own_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_JOB", tmp_path.name)


@pytest.mark.parametrize("tiers", TIERS)
def test_a_folder_that_is_no_root_any_more(tiers: str, tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    options = TIERS[tiers](tmp_path)
    ck = ckptd.Checkpointer(str(root), when_failed="warn", **options)
    saved(ck, 1)
    root.rename(away)
    assert refusal(ck, 2) == "root-gone"
    assert not root.exists()
    root.mkdir()  # as the mount point of what was unmounted
    assert refusal(ck, 3) == "root-gone"
    assert list(root.iterdir()) == []
    root.rmdir()
    away.rename(root)
    saved(ck, 4)
    ck.close()
    assert loaded(str(root)) == 4


@pytest.mark.parametrize("tiers", TIERS)
def test_a_root_made_anew_under_a_living_job(tiers: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = TIERS[tiers](tmp_path)
    old = ckptd.Checkpointer(str(root), keep=1, when_failed="warn", **options)
    saved(old, 1)
    root.rename(tmp_path / "away")  # whole, at one moment: the writing process still tidies up
    shutil.rmtree(tmp_path / "away", ignore_errors=True)
    with ckptd.Checkpointer(str(root), keep=1) as new:
        saved(new, 1)
        assert refusal(old, 9) == "other-root"
        saved(new, 2)
    assert refusal(old, 10) == "other-root"
    abandoned(old)
    catalogue = Catalogue(open_store(str(root)))
    assert [n.step for n in catalogue.line()] == [2]
    assert loaded(str(root)) == 2


@pytest.mark.parametrize("server", [MOTO])
def test_a_bucket_that_is_emptied_under_a_living_job(
    server: str, request: pytest.FixtureRequest
) -> None:
    url, options = s3_url(), request.getfixturevalue(server)
    ck = ckptd.Checkpointer(url, store_options=options, when_failed="warn")
    saved(ck, 1)
    store = open_store(url, **options)
    store.delete([o.key for o in store.list()])
    assert refusal(ck, 2) == "root-gone"
    Catalogue(store).create_or_open()
    assert refusal(ck, 3) == "other-root"
    assert Catalogue(store).commits() == []
    abandoned(ck)


# -- another run's root ----------------------------------------------------------------------------


def test_a_forgotten_load_is_refused(tmp_path: Path) -> None:
    root = str(tmp_path)
    with ckptd.Checkpointer(root, keep=1) as ck:
        saved(ck, 10)
    with ckptd.Checkpointer(root, keep=1) as ck:
        with pytest.raises(RefusedError) as caught:
            ck.save(11, state_of(11))
        assert caught.value.kind == "not-loaded"
        # The loop of the README goes on, also after it was told so.
        assert ck.latest() == 10
        assert ck.load(state_of(0)) == 10
        saved(ck, 11)
    assert loaded(root) == 11


def test_no_rule_deletes_what_another_run_wrote(tmp_path: Path, cli: Cli) -> None:
    root = str(tmp_path)
    with ckptd.Checkpointer(root) as ck:
        for step in (10, 20):
            saved(ck, step)
    with ckptd.Checkpointer(root, new_run=True, keep=1) as ck:
        saved(ck, 1)
        for part, kind in (("generations", Generation), ("commits", Commit)):
            for path in (tmp_path / part).iterdir():  # long ago: no grace period is left
                record = decode_record(path.read_bytes(), kind, "")
                path.write_bytes(encode_record(replace(record, created=LONG_AGO)))
        for step in (2, 3):
            saved(ck, step)
        assert ck.latest() == 3
    catalogue = Catalogue(open_store(root))
    assert [n.step for n in catalogue.commits()] == [3, 10, 20]
    assert cli("gc", root, "--keep", "1", "--abandoned", "0s", "--yes").code == 0
    assert [n.step for n in catalogue.commits()] == [3, 10, 20]
    assert cli("gc", root, "--abandoned", "0s", "--other-runs", "--yes").code == 0
    assert [n.step for n in catalogue.commits()] == [3]


# -- no room, and no leave to write ----------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[list[events.LoadDone]]:
    found: list[events.LoadDone] = []

    def hear(event: object) -> None:
        if isinstance(event, events.LoadDone):
            found.append(event)

    subscription = events.subscribe(hear, inline=True)
    yield found
    subscription.close()


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_nothing_can_be_written_and_everything_is_read(
    how: str,
    tmpfs: Mounted,
    cli: Cli,
    seen: list[events.LoadDone],
) -> None:
    root = tmpfs.path / "root"
    with ckptd.Checkpointer(str(root)) as ck:
        saved(ck, 1)
        saved(ck, 2)
    if how == "full":
        tmpfs.fill(leave=0)
        with (tmpfs.path / "rest").open("wb", buffering=0) as rest, pytest.raises(OSError):
            while True:
                rest.write(b"x" * 512)
    else:
        tmpfs.remount("ro")
    before = sorted(str(p) for p in root.rglob("*") if p.is_file())
    state = state_of(0)
    ck = ckptd.Checkpointer(str(root), when_failed="warn")
    assert ck.latest() == 2
    assert ck.load(state) == 2
    assert state["step"] == 2
    assert ck.last_load is not None
    assert any("without one" in text for text in ck.last_load.warnings)
    assert any("generation" in text for text in ck.last_load.warnings)
    assert any("without one" in text for text in seen[-1].warnings)
    assert ck.load(state, 1) == 1
    with pytest.raises(StoreError):
        ck.save(2, state_of(2))
    for verb in (("verify",), ("inspect",), ("ls",), ("ls", "--all"), ("pin", "--list")):
        found = cli(verb[0], str(root), *verb[1:], "--json")
        assert found.code == 0, found.err
    found = cli("verify", str(root), "--json")
    assert any("without one" in text for text in found.document["warnings"])
    copy = tmpfs.path.parent / "copy"
    assert cli("cp", str(root), str(copy), "--json").code == 0
    assert sorted(str(p) for p in root.rglob("*") if p.is_file()) == before
    # Room comes back: what was loaded is claimed now, and training goes on from it.
    if how == "full":
        (tmpfs.path / "ballast").unlink()
        (tmpfs.path / "rest").unlink()
    else:
        tmpfs.remount("rw")
    saved(ck, 2)
    assert ck.generation == 2
    ck.close()
    assert [n.step for n in Catalogue(open_store(str(root))).line()] == [1, 2]


def test_a_late_claim_does_not_hide_what_others_began(tmpfs: Mounted) -> None:
    root = str(tmpfs.path / "root")
    with ckptd.Checkpointer(root) as ck:
        saved(ck, 1)
    tmpfs.remount("ro")
    late = ckptd.Checkpointer(root)
    assert late.load(state_of(0)) == 1
    tmpfs.remount("rw")
    with ckptd.Checkpointer(root) as other:
        other.load(state_of(0))
        saved(other, 2)
    with pytest.raises(ConflictError) as caught:
        late.save(2, state_of(2))
    assert caught.value.kind == "superseded"
    late.close()
    assert loaded(root) == 2


def test_a_limit_on_file_sizes_is_a_full_disk_to_a_lease(tmp_path: Path) -> None:
    """No mount is needed: a process that may write no byte loads all the same."""
    root = str(tmp_path / "root")
    with ckptd.Checkpointer(root) as ck:
        saved(ck, 1)
    program = f"""
import json, resource, signal, sys
import ckptd, torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ck = ckptd.Checkpointer({root!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
state = {{"w": torch.zeros(1 << 12), "step": 0}}
step = ck.load(state)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
ck.close()
print(json.dumps([step, float(state["w"][0]), list(ck.last_load.warnings)]))
"""
    done = programs.run("-c", program)
    assert done.returncode == 0, done.stderr
    step, value, warnings = json.loads(done.stdout.splitlines()[-1])
    assert (step, value) == (1, 1.0)
    assert any("without one" in text for text in warnings)
