"""Folders of other formats: deaths at every operation, shares, what is there already."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptd.checkpoint.cli.address import CheckpointAddress, held, opened
from ckptd.checkpoint.load.reader import CkptdReader
from ckptd.checkpoint.root.working import Working
from ckptd.errors import (
    CkptdError,
    ConflictError,
    NotFoundError,
    RefusedError,
    StoreError,
    UsageError,
)
from ckptd.reshard.execute import Budget, Executor
from ckptd.reshard.job import ReshardShare
from ckptd.reshard.prepare import prepare, source_program
from ckptd.reshard.reports import Resharded
from ckptd.reshard.source import open_own
from ckptd.reshard.writers import folder as folders
from ckptd.reshard.writers.dcp import DcpPlace
from ckptd.reshard.writers.folder import FolderJob, OutputFormat
from ckptd.reshard.writers.hf import HfPlace
from ckptd.reshard.writers.rankfiles import RanksPlace
from ckptd.reshard.writers.torchdist import TorchDistPlace
from ckptd.reshard.writers.universal import UniversalPlace
from ckptd.store import open_store
from ckptd.store.base import FaultRule, FaultSpec, Store
from ckptd.store.fault import Fault
from ckptd.store.local import LocalStore
from tests.checkpoint.load.builder import Array
from tests.readers.opening import open_reader
from tests.reshard.llama import prepared, program, save
from tests.sampling import sampled

DATA = {f"w.{n}": np.arange(n * 6, dtype=np.float32).reshape(n, 6) for n in (3, 5, 8)}


@contextmanager
def job(kind: str, source: Path, out: Path, *, force: bool = False) -> Iterator[FolderJob]:
    with open_store(source) as store:
        to = "fsdp" if kind in ("dcp", "ranks") else "ddp"
        rules = ["mesh fsdp = dp:2"] if to == "fsdp" else []
        rules += ['files "rank{dp}/model.pt"'] if kind == "ranks" else []
        found = prepared(store, program(to, *rules))
        place: OutputFormat
        if kind == "dcp":
            place = DcpPlace(found.assembled, found.expected)
        elif kind == "universal":
            place = UniversalPlace(found.assembled, found.expected)
        elif kind == "torch_dist":
            place = TorchDistPlace(found.assembled, found.expected)
        elif kind == "ranks":
            place = RanksPlace(found.assembled, found.expected)
        else:
            place = HfPlace(found.assembled, found.expected, 100)
        source_of = found.stock.source
        yield FolderJob(source_of, place, out, identity=found.identity, force=force)


def reshard_again(source: Path, out: Path) -> None:
    """Write a folder of DCP, or a universal one, from a foreign checkpoint."""
    kind = UniversalPlace if source.name.startswith("global_step") else DcpPlace
    with opened(str(source), 0, foreign=True) as catalogue:
        with held(catalogue, CheckpointAddress.of(str(source)).find(catalogue), "test") as commit:
            stock = open_own(CkptdReader(catalogue, commit))
            found = prepare(stock, source_program(stock, None), program("ddp"))
            place = kind(found.assembled, found.expected)
            made = FolderJob(stock.source, place, out, identity=found.identity, force=True)
            made.run(ReshardShare(), Budget.of(64 << 20, stock.source.store))


def run(kind: str, source: Path, out: Path, share: Any = None, **options: bool) -> Resharded:
    with job(kind, source, out, **options) as made:
        budget = Budget(32 << 20, 2 << 20, 8 << 20, 4 << 20, 2, 1)
        return made.run(share or ReshardShare(), budget)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with open_store(tmp_path / "source") as store:
        save(store, DATA)
    return tmp_path / "source"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def tensors(folder: Path) -> dict[str, Array]:
    reader = open_reader(folder)
    return reader.tensors(reader.names)


def same(found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[n], wanted[n]) for n in found)


@sampled(3)
@pytest.mark.parametrize("kind", ["hf", "dcp", "universal", "torch_dist", "ranks"])
def test_death_at_every_operation(
    kind: str, every: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint, or a whole one, after each; the next run completes it, with the same bytes."""
    run(kind, source, tmp_path / "calm")
    wanted = contents(tmp_path / "calm")
    tried, resumed, number = 0, 0, 0
    out = tmp_path / "out"
    while True:
        number += every
        shutil.rmtree(out, ignore_errors=True)
        spec = FaultSpec((FaultRule(action="die" if number % 2 else "die-after", number=number),))
        made: list[Fault] = []

        def opened(path: Path, spec: FaultSpec = spec, made: list[Fault] = made) -> Store:
            if path != out:  # leases: a process that really dies leaves none that counts
                return LocalStore(path)
            made.append(Fault(LocalStore(path), spec))
            return made[-1]

        with monkeypatch.context() as patch:
            patch.setattr(folders, "LocalStore", opened)
            try:
                run(kind, source, out)
            except StoreError:
                tried += 1
        if len(made[0].operations) < number:
            break
        with suppress(NotFoundError):  # it is not taken for a checkpoint
            assert kind == "ranks" or same(tensors(out), DATA)
        if not out.exists() or contents(out) != wanted:
            resumed += run(kind, source, out).reused_files > 0
        assert contents(out) == wanted
    assert tried > 10 // every
    assert resumed


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_death_while_files_get_their_names(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(kind, source, tmp_path / "calm")
    real, count = os.replace, 0

    def dies(*given: Any) -> None:
        nonlocal count
        count += re.search(r"/[0-9a-f]{16}/", str(given[0])) is not None
        if count > 1:
            raise KeyboardInterrupt
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", dies)
        with pytest.raises(KeyboardInterrupt):
            run(kind, source, tmp_path / "out")
    with pytest.raises(CkptdError) as caught:
        tensors(tmp_path / "out")
    assert isinstance(caught.value, NotFoundError) or "is missing" in caught.value.message
    done = run(kind, source, tmp_path / "out")
    assert (done.state, done.reused_files) == ("committed", done.files)
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_shares_and_what_is_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("dcp", source, out, ReshardShare(2, 2)).state == "waiting"
    with pytest.raises(NotFoundError):
        tensors(out)
    assert run("dcp", source, out, ReshardShare(1, 2)).state == "committed"
    wanted = contents(out)
    (out / "notes.txt").write_text("mine")
    for kind in ("dcp", "hf"):
        with pytest.raises(RefusedError) as caught:
            run(kind, source, out)
        assert caught.value.kind == "exists"
    with pytest.raises(RefusedError):  # --force replaces what is of the same format
        run("hf", source, out, force=True)
    # A file that is only called as one of Megatron's is the user's.
    (out / "metadata.json").write_text("{}")
    run("dcp", source, out, force=True)
    assert contents(out) == wanted | {"notes.txt": b"mine", "metadata.json": b"{}"}
    assert same(tensors(out), DATA)
    # What Megatron puts beside would make another checkpoint of it.
    (out / "common.pt").write_bytes(b"{}")
    run("dcp", source, out, force=True)
    assert contents(out) == wanted | {"notes.txt": b"mine"}
    assert same(tensors(out), DATA)
    with pytest.raises(UsageError) as of_source:
        run("dcp", source, source, force=True)
    assert "the checkpoint would replace its own source" in of_source.value.message


def test_another_size_of_files_is_another_job(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("hf", source, out, ReshardShare(1, 2))
    with open_store(source) as store:
        found = prepared(store, program("ddp"))
        place = HfPlace(found.assembled, found.expected, 10**9)
        budget = Budget.of(64 << 20, store)
        with pytest.raises(RefusedError) as caught:
            FolderJob(found.stock.source, place, out, identity=found.identity).run(
                ReshardShare(), budget
            )
        assert caught.value.kind == "exists"
        made = FolderJob(found.stock.source, place, out, identity=found.identity, force=True)
        done = made.run(ReshardShare(), budget)
    assert (done.state, done.reused_files) == ("committed", 0)
    assert same(tensors(out), DATA)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another source with tensors of the same names, types and shapes."""
    with open_store(tmp_path / "other") as store:
        save(store, {name: -1 - value for name, value in DATA.items()})
    return tmp_path / "other"


@pytest.mark.parametrize("kind", ["hf", "dcp", "universal"])
def test_two_jobs_do_not_share_a_folder(
    kind: str, source: Path, other: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(kind, source, out, ReshardShare(1, 2))
    before = contents(out)
    with pytest.raises(RefusedError) as caught:
        run(kind, other, out, ReshardShare(1, 2))
    assert caught.value.kind == "exists"
    assert contents(out) == before
    assert run(kind, source, out, ReshardShare(2, 2)).state == "committed"
    assert same(tensors(out), DATA)
    # With --force the newer job counts, and nothing of the one that it dropped.
    run(kind, other, out, ReshardShare(1, 2), force=True)
    assert same(tensors(out), DATA)
    run(kind, source, out, ReshardShare(1, 2), force=True)
    with pytest.raises(RefusedError):
        run(kind, other, out, ReshardShare(2, 2))
    run(kind, other, out, ReshardShare(2, 2), force=True)
    assert run(kind, other, out, ReshardShare(1, 2), force=True).state == "committed"
    run(kind, other, tmp_path / "calm")
    assert contents(out) == contents(tmp_path / "calm")


def test_what_is_left_of_a_job_does_not_replace_a_checkpoint(
    source: Path, other: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run("dcp", other, out)
    wanted = contents(out)
    run("dcp", source, out, ReshardShare(1, 2), force=True)
    for share in (ReshardShare(1, 2), ReshardShare(2, 2)):  # as after a kill, without --force
        with pytest.raises(RefusedError) as caught:
            run("dcp", source, out, share)
        assert caught.value.kind == "exists"
    assert contents(out).items() >= wanted.items()
    assert run("dcp", source, out, ReshardShare(2, 2), force=True).state == "committed"
    assert same(tensors(out), DATA)


def test_a_replacement_that_was_begun_goes_on_and_removes_no_other_file(
    source: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    run("dcp", source, tmp_path / "calm")
    run("dcp", other, out)
    real: Any = FolderJob._give_name
    named: list[object] = []

    def dies(*given: Any) -> None:
        if named:
            raise KeyboardInterrupt
        named.append(given)
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(FolderJob, "_give_name", dies)
        with pytest.raises(KeyboardInterrupt):
            run("dcp", source, out, force=True)
    assert not (out / ".metadata").exists()
    with pytest.raises(RefusedError):  # another job does not take the rest for its own
        run("dcp", other, out)
    (out / "__9_0.distcp").write_bytes(b"later")
    done = run("dcp", source, out)
    assert (done.state, done.reused_files) == ("committed", done.files)
    assert contents(out) == contents(tmp_path / "calm") | {"__9_0.distcp": b"later"}


def test_a_checkpoint_that_appears_while_the_job_runs_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = Executor.run

    def late(*given: Any) -> None:
        real(*given)
        (out / ".metadata").write_bytes(b"another program's")

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", late)
        with pytest.raises(RefusedError) as caught:
            run("dcp", source, out)
    assert caught.value.kind == "exists"
    assert (out / ".metadata").read_bytes() == b"another program's"
    (out / ".metadata").unlink()
    done = run("dcp", source, out)
    assert (done.state, done.reused_files) == ("committed", done.files)


@pytest.mark.parametrize("at", ["writing", "finishing", "dying"])
def test_two_processes_of_one_share(
    at: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is refused; where its lease does not hold it back, the checkpoint is whole."""
    out = tmp_path / "out"
    run("dcp", source, tmp_path / "calm")
    real_run: Any = Executor.run
    real_finish: Any = FolderJob._finish
    inner: list[str] = []

    def other_process() -> None:
        if not inner:
            inner.append("refused")
            with pytest.raises(ConflictError) as caught:
                run("dcp", source, out)
            assert "another process is writing here" in caught.value.message
            with pytest.raises(ConflictError):  # a share of another count has files of this one
                run("dcp", source, out, ReshardShare(2, 2))
            with monkeypatch.context() as patch:
                patch.setattr(Working, "enter", lambda self, name, rivals: self.touch(name))
                inner.append(run("dcp", source, out).state)

    def running(*given: Any) -> None:
        is_first = not inner
        other_process()
        if at == "dying" and is_first:
            drafts = {f: d for f, d in given[2].items() if not f}
            real_run(*given[:2], drafts, *given[3:])
            raise KeyboardInterrupt
        real_run(*given)

    def finishing(*given: Any) -> str:
        other_process()
        return str(real_finish(*given))

    with monkeypatch.context() as patch:
        if at == "finishing":
            patch.setattr(FolderJob, "_finish", finishing)
        else:
            patch.setattr(Executor, "run", running)
        if at == "dying":
            with pytest.raises(KeyboardInterrupt):
                run("dcp", source, out)
        else:
            assert run("dcp", source, out).state == "present"
    assert inner == ["refused", "committed"]
    assert contents(out).items() >= contents(tmp_path / "calm").items()
    if at != "dying":
        assert contents(out) == contents(tmp_path / "calm")


def test_what_a_killed_process_left_halfway_is_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("dcp", source, tmp_path / "calm")
    run("dcp", source, out, ReshardShare(1, 2))
    (job_folder,) = (p for p in out.iterdir() if p.name.startswith(".ckptd-"))
    left = job_folder / "0123456789abcdef" / "__1_0.distcp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert run("dcp", source, out, ReshardShare(1, 2)).reused_files == 1
    assert not left.parent.exists()
    run("dcp", source, out, ReshardShare(2, 2))
    assert contents(out) == contents(tmp_path / "calm")


@pytest.mark.parametrize("kind", ["dcp", "universal"])
def test_names_are_durable_before_the_folder_is_a_checkpoint(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, events = tmp_path / "out", []

    def opened(path: Path) -> LocalStore:
        store = LocalStore(path)
        store.watch(lambda point, where: events.append((point, Path(where))))
        return store

    with monkeypatch.context() as patch:
        patch.setattr(folders, "LocalStore", opened)
        run(kind, source, out)
    files = [p for p in out.rglob("*") if p.is_file()]
    small = [i for i, e in enumerate(events) if e[0] == "os.replace" and e[1] in files]
    synced = {p for point, p in events[: small[0]] if point == "os.fsync-folder"}
    assert {f.parent for f in files} | {tmp_path} <= synced
    last = next(
        i for i, e in enumerate(events) if e[1].name in ("begun", "finishing") and i > small[-1]
    )
    assert ("os.fsync-folder", events[small[-1]][1].parent) in events[small[-1] : last]


def test_a_source_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("dcp", source, out)
    before = contents(out)
    (tmp_path / "link").symlink_to(out)
    for name in ("out", "link"):
        with pytest.raises(UsageError) as caught:
            reshard_again(out, tmp_path / name)
        assert "the checkpoint would replace its own source" in caught.value.message
    run("universal", source, tmp_path / "universal")
    (tmp_path / "universal/latest_universal").unlink()
    with pytest.raises(UsageError) as caught:  # its files lie below the source's folder
        reshard_again(next((tmp_path / "universal").iterdir()), tmp_path / "universal")
    assert "the checkpoint would replace its own source" in caught.value.message
    assert contents(out) == before
    reshard_again(out, out / "below")  # nothing that is read is there
    assert same(tensors(out / "below"), DATA)


def test_a_link_that_leads_out_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (out / "rank1").symlink_to(elsewhere)
    with pytest.raises(RefusedError) as caught:
        run("ranks", source, out, force=True)
    assert "a symbolic link leads out of the store" in caught.value.message
    assert [p.name for p in out.iterdir()] == ["rank1"]
    assert not [*elsewhere.iterdir()]


@pytest.mark.parametrize(
    "name", ["rank0.safetensors", "rank0.pt", "pytorch_model.bin", "model.safetensors"]
)
def test_files_of_another_format_are_another_checkpoint(
    name: str, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"tensors")
    for force in (False, True):
        with pytest.raises(RefusedError) as caught:
            run("dcp", source, out, force=force)
        assert caught.value.kind == "exists"
    (out / name).rename(out / "training_args.bin")
    assert run("dcp", source, out).state == "committed"


def test_a_file_that_is_called_as_megatrons_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    about = out / "metadata.json"
    about.write_text("{}")
    assert run("dcp", source, out).state == "committed"
    assert run("dcp", source, out, force=True).state == "committed"
    assert about.read_text() == "{}"
    assert same(tensors(out), DATA)
    with pytest.raises(RefusedError) as caught:  # which writes one itself
        run("torch_dist", source, out)
    assert caught.value.kind == "exists"
    assert run("torch_dist", source, out, force=True).state == "committed"
    # Now it is Megatron's, and does not stay beside another checkpoint.
    assert run("dcp", source, out, force=True).state == "committed"
    assert not about.exists()
