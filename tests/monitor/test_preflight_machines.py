"""What self-tests of nodes say, each by itself and beside the others."""

from __future__ import annotations

import msgspec
import pytest

from ckptd.monitor.preflight import Gpu, MachineTest, machine_findings, slow_machines

GOOD = MachineTest(
    wrong="",
    compute_s=1e-3,
    copy_bytes_per_s=2e10,
    shm_free_bytes=8 << 30,
    disk_s=1e-2,
    disk_error="",
    open_files=65536,
)
H = Gpu(name="H", memory_bytes=80 << 30)
NAMES = [f"n{k}" for k in range(8)]


def with_(**changes: object) -> dict[int, MachineTest]:
    """Return eight machines of which the fourth differs, and no two are quite alike."""
    machines = {k: msgspec.structs.replace(GOOD, compute_s=1e-3 * (1 + k / 200)) for k in range(8)}
    machines[3] = msgspec.structs.replace(machines[3], **changes)
    return machines


@pytest.mark.parametrize(
    ("changes", "status", "what"),
    [
        ({"wrong": "a matrix product"}, "fail", "arithmetic"),
        ({"disk_error": "No space left", "disk_s": float("nan")}, "fail", "disk"),
        ({"shm_free_bytes": 1 << 20}, "fail", "shared-memory"),
        ({"shm_free_bytes": 512 << 20}, "warn", "shared-memory"),
        ({"open_files": 256}, "fail", "open-files"),
        ({"open_files": 2048}, "warn", "open-files"),
        ({"gpu_error": "nvidia-smi: lost"}, "fail", "gpu"),
        ({"gpus": (H,)}, "fail", "gpu"),
    ],
)
def test_a_node_by_itself(changes: dict[str, object], status: str, what: str) -> None:
    (found,) = machine_findings(NAMES, with_(**changes), {})
    assert (found.status, found.name, found.what) == (status, "n3", what)


def test_all_is_well() -> None:
    assert not list(machine_findings(NAMES, with_(), dict.fromkeys(range(8), 0.01)))
    assert not slow_machines(NAMES, with_())


def test_gpus_that_are_missing_and_that_err() -> None:
    machines = {k: msgspec.structs.replace(GOOD, gpus=(H,) * 8) for k in range(8)}
    machines[2] = msgspec.structs.replace(GOOD, gpus=(H,) * 7)
    bad = msgspec.structs.replace(H, uncorrected=3)
    machines[5] = msgspec.structs.replace(GOOD, gpus=(*(H,) * 7, bad))
    found = [(f.name, f.message) for f in machine_findings(NAMES, machines, {})]
    assert found == [
        ("n2", "7 x H; most nodes have 8 x H"),
        ("n5", "GPU 7: 3 uncorrected memory errors"),
    ]


def test_a_clock_is_compared_with_most_others() -> None:
    skews = dict.fromkeys(range(8), 100.0)  # the coordinator's own is the one that is wrong
    skews[0] = 0.0
    (found,) = machine_findings(NAMES, with_(), skews)
    assert (found.status, found.name, found.what, found.value) == ("warn", "n0", "clock", -100.0)


@pytest.mark.parametrize(
    ("changes", "status", "what"),
    [
        ({"compute_s": 2e-3}, "fail", "compute"),
        ({"copy_bytes_per_s": 1e10}, "fail", "memory"),
        ({"disk_s": 1.0}, "warn", "disk"),
    ],
)
def test_a_node_that_is_slower_than_the_others(
    changes: dict[str, object], status: str, what: str
) -> None:
    ((node, (found,)),) = slow_machines(NAMES, with_(**changes)).items()
    assert (node, found.status, found.what) == (3, status, what)
    assert found.value is not None
    assert found.usual is not None
    assert found.value > found.usual


def test_few_nodes_are_not_compared() -> None:
    few = {k: with_(compute_s=1.0)[k] for k in (2, 3, 4)}
    assert not slow_machines(NAMES, few)


def test_nodes_that_differ_by_nature_are_not_named() -> None:
    machines = {k: msgspec.structs.replace(GOOD, compute_s=1e-3 * (1 + k)) for k in range(8)}
    assert not slow_machines(NAMES, machines)
