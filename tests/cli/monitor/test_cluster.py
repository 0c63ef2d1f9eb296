"""``ckptd doctor --cluster``: who a process is among the nodes, and what it prints."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from ckptd.monitor.cli.cluster import PORT, _place
from tests.cli.running import COMMAND, Cli, Result
from tests.processes import PATIENCE_S, free_port

SECRET = bytes(range(32)).hex()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("env", "options", "wanted"),
    [
        # torchrun, one process a node or several
        (
            {"RANK": "5", "WORLD_SIZE": "8", "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}
            | {"MASTER_ADDR": "h0", "MASTER_PORT": "29500"},
            (None, None, None),
            (4, (), 2, "h0", PORT),
        ),
        # whatever sets the four variables of torch.distributed
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1"},
            (None, None, None),
            (4, (), 1, "10.0.0.1", PORT),
        ),
        # srun
        (
            {"SLURM_NODEID": "3", "SLURM_NNODES": "4", "MASTER_ADDR": "h0"},
            (None, None, None),
            (4, (), 3, "h0", PORT),
        ),
        # options come first
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h0"},
            ("2", 0, "h9:77"),
            (2, (), 0, "h9", 77),
        ),
        ({}, ("a,b,c", None, "[::1]:77"), (3, ("a", "b", "c"), -1, "::1", 77)),
    ],
    ids=["torchrun", "torch", "srun", "options", "names"],
)
def test_place(
    env: dict[str, str],
    options: tuple[str | None, int | None, str | None],
    wanted: tuple[object, ...],
) -> None:
    place = _place(env, *options)
    found = (place.count, place.names, place.rank, place.host, place.port)
    assert found == wanted


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ([], "--nodes"),
        (["--nodes", "2"], "--rendezvous"),
        (["--nodes", "2", "--rendezvous", "h:port"], "--rendezvous"),
        (["--nodes", "2", "--rendezvous", "h:99999"], "--rendezvous"),
        (["--nodes", "2", "--rendezvous", "h:1", "--probe-bytes", "0"], "--probe-bytes"),
        (["--nodes", "2", "--rendezvous", "127.0.0.1:1"], "CKPTD_SECRET"),
    ],
)
def test_usage(cli: Cli, monkeypatch: pytest.MonkeyPatch, options: list[str], where: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_NNODES", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    result = cli("doctor", "--cluster", *options, "--json")
    assert (result.code, result.error["where"]) == (2, where)


def test_a_root_is_another_command(cli: Cli, tmp_path: Path) -> None:
    assert cli("doctor", str(tmp_path), "--cluster").code == 2


def test_other_processes_of_a_node_leave_it_to_the_first(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert cli.good("doctor", "--cluster").out == ""


def test_a_port_that_is_taken(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTD_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--nodes", "2", "--node-rank", "0", "--rendezvous", where]
        result = cli("doctor", "--cluster", *options, "--json")
    assert (result.code, result.error["kind"]) == (1, "listen")


def run_nodes(port: int, options: list[str], monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Start three nodes on this machine without numbers; the first to come coordinates."""
    monkeypatch.setenv("CKPTD_SECRET", SECRET)
    command = [*COMMAND, "doctor", "--cluster", "--nodes", "3", *options]
    command += ["--rendezvous", f"127.0.0.1:{port}", "--probe-bytes", "65536"]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    results = []
    for one in started:
        out, err = one.communicate(timeout=PATIENCE_S)
        results.append(Result(one.returncode, out, err))
    return results


def test_three_nodes_on_this_machine(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_nodes(port, ["--json"], monkeypatch)
    documents = [json.loads(r.out) for r in results]
    assert sorted(d["role"] for d in documents) == ["coordinator", "node", "node"]
    (first,) = (d for d in documents if d["role"] == "coordinator")
    name = socket.gethostname()
    assert sorted(first["nodes"]) == [name, f"{name}#2", f"{name}#3"]
    assert first["links"]["pairs"] == 3
    assert first["links"]["bytes_per_s"] > 0
    assert {d["healthy"] for d in documents} == {first["healthy"]}
    assert {r.code for r in results} == {0 if first["healthy"] else 1}
    assert {json.dumps(d["findings"]) for d in documents} == {json.dumps(first["findings"])}


def test_what_people_read(cli: Cli, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("CKPTD_SECRET", SECRET)
    options = ["--nodes", "here,there", "--rendezvous", f"127.0.0.1:{port}", "--wait-s", "2"]
    monkeypatch.setenv("CKPTD_NODE", "here")
    result = cli("doctor", "--cluster", *options)
    assert result.code == 1
    lines = result.out.splitlines()
    assert lines[0] == "nodes    1 of 2"
    assert lines[-1] == "not healthy: see `fail` above"
    assert any(line.split()[:4] == ["fail", "node", "there", "absent"] for line in lines)
    assert "1 of 2 nodes came" in result.err
