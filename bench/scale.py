"""Cost of saves and loads of a 405B job with Adam moments at 16 to 16,384 simulated ranks.

    python bench/scale.py

The ranks are simulated, the code is the real one: planning a save (every rank does it once per
structure), joining the parts of all ranks into a manifest (one rank, every save), the manifest's
size as stored, and what every loading rank does: decode, check, plan its reads.

Then all that rank 0 pays for a save because it is rank 0, in its trainer and in its writing
process: round trips to torch's store (in this process, and a TCPStore in another one), calls to
the checkpoint's store (a folder), and processor time, by stage. The other ranks post and write
before it begins, so that it is not measured how long they are waited for. The root is given a
first save, which makes plan and lineage, and a later one, which has them.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import common
import msgspec
import numpy as np
import planning
from torch.distributed import HashStore, TCPStore

from ckptd.base.digest import digest_hex
from ckptd.base.grids import sharding
from ckptd.base.torch import ranks as board_of_ranks
from ckptd.base.torch.ranks import Agreement, JobBoard, open_board
from ckptd.checkpoint.format.invariants import check_manifest
from ckptd.checkpoint.format.manifest import (
    FileEntry,
    Manifest,
    MeshEntry,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from ckptd.checkpoint.format.names import file_key
from ckptd.checkpoint.format.witness import WitnessPlan
from ckptd.checkpoint.load.plan import Want, read_plan
from ckptd.checkpoint.root.catalogue import Catalogue, remove_parts
from ckptd.checkpoint.save.commit import (
    assemble,
    commit_attempt,
    join_parts,
    reported_key,
)
from ckptd.checkpoint.save.dedup import ChunkDedup, after
from ckptd.checkpoint.save.messages import RankPart, SaveRequest
from ckptd.checkpoint.save.structure import (
    RankGroup,
    RankPlan,
    SavePlan,
    Structure,
    TensorCut,
    build_plan,
)
from ckptd.checkpoint.torch import saver
from ckptd.checkpoint.torch.job import Lineage
from ckptd.checkpoint.torch.saver import SavePlanner
from ckptd.store import StoreSpec
from ckptd.store.base import Store
from ckptd.store.wrap import Meter


def groups(layout: planning.Layout) -> list[RankGroup]:
    """Return the distinct structures of a job: one a pipeline stage."""
    tensors = planning.model()
    size = int(np.prod(layout.mesh_shape))
    out = []
    for stage in range(layout.stages):
        names = ("dp",) if len(layout.mesh_shape) == 1 else ("dp", "tp")
        mesh = MeshEntry(names, layout.mesh_shape, ((stage * size, 1, size),))
        held = []
        for t in tensors:
            if layout.stage(t) != stage:
                continue
            held.append((TensorEntry(f"optim.{t.name}.step", "float32", (), 0, 0), TensorCut()))
            cut = TensorCut(mesh, layout.placements(t))
            held += [
                (TensorEntry(f"{state}.{t.name}", "float32", t.shape, 0, 0), cut)
                for state in ("model", "exp_avg", "exp_avg_sq")
            ]
        ranks = tuple(range(stage * size, (stage + 1) * size))
        out.append(RankGroup(Structure.of(held), ranks))
    return out


def parts(plan: SavePlan, world: int) -> list[RankPart]:
    """Return what the ranks would report; sizes as the ranks would find them, each for itself."""
    totals = np.zeros(world, dtype=np.int64)
    weights: dict[tuple[int, int, int, int], int] = {}
    for t, d in zip(plan.tensors, plan.filemap.dtypes, strict=True):
        key = (t.grid, t.owners, t.base, d.itemsize)
        weights[key] = weights.get(key, 0) + d.itemsize
    for (grid, owners, base, _), itemsizes in weights.items():
        cells = plan.filemap.grids[grid]
        numels = np.array([1], dtype=np.int64)
        for axis in cells.axes:
            sizes = np.repeat([s for s, _ in axis.runs], [c for _, c in axis.runs])
            numels = np.multiply.outer(numels, sizes).reshape(-1)
        np.add.at(totals, plan.filemap.owners[owners].array(base), numels * itemsizes)
    return [
        RankPart(r, plan.digest, 1 << 16, int(n), f"{(r + 1) * 0x9E3779B97F4A7C15:032x}"[-32:])
        for r, n in enumerate(totals)
    ]


class Clock:
    """Collects named durations."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        value = work()
        self.seconds[name] = time.perf_counter() - start
        return value


def wants(manifest: Manifest, target: planning.Layout, rank: int) -> list[Want]:
    """Return what one rank of another layout asks for; the buffers are one dummy."""
    numbers = {t.name: i for i, t in enumerate(manifest.tensors)}
    stage, position = divmod(rank, int(np.prod(target.mesh_shape)))
    coordinate = tuple(int(c) for c in np.unravel_index(position, target.mesh_shape))
    dummy = np.zeros(1, dtype=np.uint8)
    out = []
    for t in planning.model():
        if target.stage(t) != stage:
            continue
        placements = target.placements(t)
        placements = sharding.nested(target.mesh_shape, placements) or placements
        regions = sharding.local_regions(t.shape, target.mesh_shape, placements, coordinate)
        elements = max((r.span[1] for r in regions), default=0)
        target_view = np.lib.stride_tricks.as_strided(dummy, (elements * 4,), (1,))
        out += [
            Want(numbers[f"{s}.{t.name}"], tuple(regions), _claimed(target_view))
            for s in ("model", "exp_avg", "exp_avg_sq")
        ]
    return out


def _claimed(view: Any) -> Any:
    """A buffer that is planned for and never written: untouched pages cost nothing."""
    return np.empty(len(view), dtype=np.uint8)


def measure(ranks: int) -> Iterator[dict[str, Any]]:
    """Yield one row per layout."""
    layouts = planning.layouts(ranks)
    for name, layout in layouts.items():
        planning.forget()
        clock = Clock()
        found = groups(layout)
        plan = clock.run("plan save s", lambda f=found: build_plan(f, ranks))
        clock.run("one rank's file s", lambda p=plan: RankPlan(p, ranks // 2))
        reported = parts(plan, ranks)
        save = SaveRequest(1000, 1, "0001", 1, plan.digest, (), (), {}, None, 60.0)
        manifest = clock.run(
            "join parts s", lambda p=plan, r=reported, s=save: assemble(p, r, s, None)
        )
        file, raw = clock.run("encode s", lambda m=manifest: encode_manifest(m))
        read = clock.run("decode s", lambda r=raw, f=file: decode_manifest(r, f))
        filemap = clock.run("check s", lambda m=read, r=raw: check_manifest(m, "m", len(r)))
        row: dict[str, Any] = {"ranks": ranks, "layout": name, "tensors": len(plan.tensors)}
        row["manifest MB"] = len(raw) / 1e6
        for other, target in layouts.items():
            asked = wants(read, target, ranks // 2)
            clock.run(
                f"plan load onto {other} s",
                lambda m=read, f=filemap, a=asked: read_plan(m, f, a).needed,
            )
        yield row | clock.seconds


# --- what rank 0 pays ----------------------------------------------------------------------------

RANKS = (16, 256, 1024, 4096, 16384)
SECRET = b"0123456789abcdef" * 2
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Absent(Exception):
    """A simulated rank would wait here: it has done its part."""


class Ahead(JobBoard):
    """The board of a simulated rank, which comes before those that it would wait for."""

    def get(self, key: str, timeout_s: float) -> bytes:
        value = self.peek(key)
        if value is None:
            raise Absent
        return value


class Counted:
    """A store of torch that counts the round trips to it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.calls[name] += 1
            return call(*args)

        return counted


@contextmanager
def torch_store(kind: str) -> Iterator[Any]:
    """Give a HashStore of this process, or connect to a TCPStore of another one."""
    if kind == "in process":
        yield HashStore()
        return
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        yield TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
        assert server.stdin is not None
        server.stdin.close()


def others_post(store: Any, found: list[RankGroup], world: int, save: str) -> None:
    """Post what all ranks but the first exchange at a first save, the last rank first."""
    bodies = [(r, g.structure.encode()) for g in found for r in g.ranks]
    for rank, raw in sorted(bodies, reverse=True)[:-1]:
        board = Ahead(store, rank, world, "job/", SECRET)
        with suppress(Absent):
            SavePlanner(Agreement(board, 60.0))._exchange(digest_hex(raw), raw, save)
    for group in found:
        raw = group.structure.encode()
        if group.ranks[0]:
            Ahead(store, 0, world, "job/", SECRET).set(f"structure/{digest_hex(raw)}", raw)


def others_open(store: Any, world: int) -> None:
    """Post what the ranks below the first answer to a number of zeros."""
    for rank in board_of_ranks._below(0, world):
        Ahead(store, rank, world, "job/opening/", SECRET).set(f"life/{rank}", bytes(32))


def others_write(store: Store, reported: list[RankPart], save: SaveRequest) -> None:
    """Write the parts of all ranks, and join those of each block as its first rank does."""
    for part in reported:
        path = store.local_path(reported_key(save.folder, part.rank))
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(part.encode())
    for part in reported[1:]:
        join_parts(store, save.folder, part.rank, len(reported), lambda: None, 60.0)


class Bill:
    """Cost for rank 0, by stage: processor seconds of this process, and round trips."""

    def __init__(self, job_store: Counted, store: Meter) -> None:
        self._job_store, self._store = job_store, store
        self.row: dict[str, Any] = {}
        self._last = self._now()

    def _now(self) -> tuple[float, int, int]:
        calls = sum(m.calls for m in self._store.snapshot().values())
        return time.process_time(), self._job_store.calls.total(), calls

    def begin(self) -> None:
        """Count from here: what simulated ranks did is not rank 0's."""
        gc.collect()
        gc.freeze()
        self._last = self._now()

    def stage(self, name: str) -> None:
        """Enter what was spent since the last stage."""
        now = self._now()
        spent = [n - last for n, last in zip(now, self._last, strict=True)]
        for what, value in zip(("total s", "round trips", "store calls"), spent, strict=True):
            self.row[what] = self.row.get(what, 0) + value
        self.row[f"{name} s"] = spent[0]
        self._last = self._now()


@contextmanager
def planning_begins(call: Callable[[], None]) -> Iterator[None]:
    """Call `call` where the ranks have exchanged what they plan from."""
    real = saver.build_plan

    def build(*args: Any) -> SavePlan:
        call()
        return real(*args)

    saver.build_plan = build
    try:
        yield
    finally:
        saver.build_plan = real


def pays(ranks: int, name: str, kind: str) -> Iterator[dict[str, Any]]:
    """Yield what rank 0 pays for a first save, and for a later one."""
    planning.forget()
    found = groups(planning.layouts(ranks)[name])
    mine = next(g.structure for g in found if 0 in g.ranks)
    with torch_store(kind) as job_store, tempfile.TemporaryDirectory() as folder:
        counted, inner = Counted(job_store), StoreSpec(folder).open()
        bill = Bill(counted, store := Meter(inner))
        # The others are of no life here: their key is that of the secret alone.
        agreement = Agreement(JobBoard(counted, 0, ranks, "job/", SECRET), 60.0)
        catalogue = Catalogue(store)
        lineage, planner = Lineage(catalogue, agreement, new_run=True), SavePlanner(agreement)
        dedup = ChunkDedup(catalogue, 0, ranks)
        rank_plan: RankPlan | None = None
        for step in (1, 2):
            bill.row = {"save": ("first", "later")[step - 1]}
            bill.row |= {"ranks": ranks, "layout": name, "board": kind}
            if step == 1:
                others_open(job_store, ranks)
            bill.begin()
            if step == 1:
                with patch.object(board_of_ranks.secrets, "token_bytes", bytes):
                    open_board(counted, 0, ranks, "job/", SECRET, 60.0)
                bill.stage("open")
            lineage.claim_for_save(step)
            attempt = lineage.next_attempt()
            bill.stage("claim")
            key = f"save/{lineage.generation}/{step}/{attempt}"
            if step == 1:
                others_post(job_store, found, ranks, key)
                planning.forget()
                bill.begin()
            with planning_begins(partial(bill.stage, "exchange")):
                plan = planner.plan(mine, key)
            if rank_plan is None:
                rank_plan = RankPlan(plan, 0)
            bill.stage("plan")
            save = SaveRequest(
                step,
                lineage.generation,
                attempt,
                job=step,
                plan=plan.digest,
                timeout_s=60.0,
                root_id=lineage.root_id,
                claim_id=lineage.claim_id,
            )
            others_write(inner, reports(plan, ranks), save)
            bill.begin()
            dedup.begin(save, rank_plan, lambda: None)
            bill.stage("refer")
            table = np.zeros((len(rank_plan.chunks), 2), dtype=np.uint64)
            dedup.wrote(save, after(plan.digest, FileEntry(file_key(save.folder, 0), 0, 1), table))
            bill.begin()

            def gathered(parts: Any) -> None:
                dedup.gathered(parts)
                bill.stage("gather parts")

            commit = commit_attempt(catalogue, plan, save, lambda: None, 60.0, 0, gathered)
            dedup.end(save, commit)
            bill.stage("join, commit")
            remove_parts(store, save.folder)
            bill.stage("remove parts")
            agreement.board.peek(f"{key}/failed")
            agreement.board.set(key, b"{}")
            bill.stage("report")
            yield bill.row


def reports(plan: SavePlan, world: int) -> list[RankPart]:
    """Return the parts of all ranks, with a share of the witness each."""
    total = WitnessPlan.over(plan.tensors).total
    shares = np.array_split(np.arange(total, dtype="<u4"), world)
    return [
        msgspec.structs.replace(p, slots=s.tobytes(), values=bytes(8 * len(s)), seeks=True)
        for p, s in zip(parts(plan, world), shares, strict=True)
    ]


def tables(ranks: tuple[int, ...]) -> tuple[str, list[dict[str, Any]]]:
    """Return the tables of what rank 0 pays, and their rows."""
    kinds = ("in process", "TCPStore")
    layouts = ("fsdp2", "tp.pp.fsdp")
    rows = [dict(r) for n in ranks for la in layouts for k in kinds for r in pays(n, la, k)]
    text = ""
    for save in ("first", "later"):
        body = [{k: v for k, v in r.items() if k != "save"} for r in rows if r["save"] == save]
        head = sorted(body[0], key=list(body[0]).index)
        head = ["ranks", "layout", "board", "total s", *(h for h in head[3:] if h != "total s")]
        cells = [[f"{r[k]:.3f}" if isinstance(r[k], float) else r[k] for k in head] for r in body]
        text += f"What rank 0 pays for its {save} save: CPU seconds, and calls.\n\n"
        text += common.table(head, cells) + "\n\n"
    return text.rstrip(), rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    options.add_argument("--only", choices=("pays",))
    given = options.parse_args()
    paid, bills = tables(tuple(given.ranks))
    if given.only:
        print(paid)
        return
    rows = [row for ranks in planning.RANKS for row in measure(ranks)]
    head = list(rows[0])
    text = "A 405B model with Adam moments; seconds of one process, caches empty.\n\n"
    body = [[f"{r[k]:.3f}" if isinstance(r[k], float) else r[k] for k in head] for r in rows]
    text += common.table(head, body) + "\n\n" + paid
    common.publish("scale", "python bench/scale.py", text, {"plans": rows, "pays": bills})


if __name__ == "__main__":
    main()
