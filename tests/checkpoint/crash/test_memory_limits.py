"""No memory to stage in: a clear error from the save, never SIGBUS or the kernel's killer later."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptd.base.runtime.host import available_bytes
from ckptd.base.runtime.ranks import LocalBoard
from ckptd.checkpoint.save.arena import Slot
from ckptd.checkpoint.save.client import WriterClient
from ckptd.errors import SaveError
from ckptd.store import StoreSpec
from tests.checkpoint.crash.mounts import Mounted, tmpfs
from tests.processes import PATIENCE_S

__all__ = ["tmpfs"]

CHILD = """
    import sys
    from ckptd.base.runtime.host import available_bytes
    from ckptd.errors import SaveError
    from ckptd.store import StoreSpec
    from tests.checkpoint.save.saving import Job, plan_of, values
    job = Job(StoreSpec(sys.argv[1]), plan=plan_of({{"w": (300_000,)}}))
    job.save(1, values(1, {{"w": (300_000,)}})).durable(60.0)
    {limit}
    try:
        job.client.acquire(800_000_000, 5.0)
    except SaveError as error:
        print(error.kind, error)
    job.save(2, values(2, {{"w": (300_000,)}}), attempt="0002").durable(60.0)
    print("latest", job.catalogue.latest().step, flush=True)
    job.close()
"""


def run_child(root: Path, limit: str = "") -> str:
    text = textwrap.dedent(CHILD).format(limit=limit)
    top = str(Path(__file__).parents[3])
    ended = subprocess.run(
        [sys.executable, "-c", text, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=top,
    )
    assert ended.returncode == 0, f"ended with {ended.returncode}: {ended.stdout}"
    return ended.stdout


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 500 MB."""
    version_1 = Path("/sys/fs/cgroup/memory")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    name, top = ("memory", version_1) if version_1.is_dir() else ("", Path("/sys/fs/cgroup"))
    own = next((f[2] for f in fields if name in f[1].split(",")), "/")
    group = top / own.lstrip("/") / f"ckptd-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if name else "memory.max")
    try:
        group.mkdir()
        limit.write_text("500000000")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield group
    group.rmdir()


def test_a_containers_limit(small_group: Path, tmp_path: Path) -> None:
    """Allocating past it would not fail: the kernel would kill the trainer."""
    enter = f"open({str(small_group / 'cgroup.procs')!r}, 'w').write('0')"
    said = run_child(tmp_path, f"{enter}; assert available_bytes() < 500_000_000")
    assert said.startswith("no-memory")
    assert "MiB of shared memory" in said
    assert said.endswith("latest 2\n")


@pytest.mark.parametrize("which", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_process(which: str, tmp_path: Path) -> None:
    assert hasattr(resource, which)
    used = "sum(int(l.split()[1]) for l in open('/proc/self/status') if l[:7] == 'VmSize:') << 10"
    room = f"400_000_000 + ({used} if {which == 'RLIMIT_AS'} else 0)"
    said = run_child(
        tmp_path, f"import resource as r; r.setrlimit(r.{which}, ({room}, r.RLIM_INFINITY))"
    )
    assert said.startswith("no-memory")
    assert said.endswith("latest 2\n")


def test_a_small_file_system_for_segments(tmpfs: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no memfd the segment is a file, say in a container's 64 MB of /dev/shm."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmpfs.path))
    slot = Slot(0, 1 << 20)
    slot.data[-1:] = b"x"
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SaveError) as caught:
        Slot(1, tmpfs.nbytes)
    assert caught.value.kind == "no-memory"
    assert "No space left" in (caught.value.found or "")
    assert len(os.listdir("/proc/self/fd")) == open_files
    slot.close()


def test_a_state_larger_than_the_machine(tmp_path: Path) -> None:
    client = WriterClient(StoreSpec(str(tmp_path)), LocalBoard())
    with pytest.raises(SaveError) as caught:
        client.acquire(2 * available_bytes(), 5.0)
    assert caught.value.kind == "no-memory"
    assert client.acquire(1 << 20, 5.0).nbytes == 1 << 20
    client.close(20.0)


def test_limits_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 2, as `small_group` gives whichever is mounted here: the tightest group counts."""
    import ckptd.base.runtime.host as memory

    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    rooms = {"job/step": ("max", 300, 0), "job": ("1000", 700, 100), "": ("5000", 4000, 0)}
    for name, (limit, used, cache) in rooms.items():
        folder = tmp_path / "fs" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\nactive_file 50\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "fs")
    monkeypatch.setattr(memory, "_OWN", own)
    assert memory.available_bytes() == 450
    own.write_text("0::/somewhere/else\n")
    assert memory.available_bytes() == 1050
    own.unlink()
    assert memory.available_bytes() > 5000
