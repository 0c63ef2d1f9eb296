"""Ranks do not have the secret: what their launcher hands them proves them, and orders nobody."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from ckptd.base.net import handed
from ckptd.base.net.handed import (
    KEPT_FROM_RANKS,
    AskProof,
    FromLauncher,
    given_proof,
    ranks_key,
)
from ckptd.base.net.roles import Certified, Role
from ckptd.base.net.signing import SECRET_VARIABLE
from ckptd.base.net.tls import LEAF_S, Identity, hand
from ckptd.elastic.workerend import LauncherEnd
from ckptd.errors import ProcessError, UsageError
from ckptd_demo.processes import free_port
from tests.base.net.test_tls import sessions, shaken
from tests.cli.running import COMMAND
from tests.processes import PATIENCE_S

SECRET = "a secret of no digits, but long"


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LauncherEnd:
    """A launcher that has a secret, and whose ranks are other processes than this one."""
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    end = LauncherEnd(
        tmp_path / "launcher.sock",
        lambda *_: None,
        lambda _: False,
        lambda asked: hand(SECRET, "n1", asked),
    )
    monkeypatch.setenv("CKPTD_LAUNCHER", str(end.path))
    return end


def test_a_process_without_the_secret_proves_itself(launcher: LauncherEnd) -> None:
    assert given_proof() == FromLauncher()
    assert ranks_key() == hand(SECRET, "n1", AskProof()).key != SECRET.encode()
    server = Identity(SECRET.encode(), "controller", "n0")
    roles: tuple[Literal["rank", "worker"], ...] = ("rank", "worker")
    for role in roles:
        client, listening = sessions(Identity(FromLauncher(), role, "n2"), server)
        assert shaken(client, listening)
        assert listening.peer == Certified(role, "n1")  # the launcher says which node it is
        assert client.peer == Certified("controller", "n0")
    launcher.close()


def test_no_other_role_is_handed_out(launcher: LauncherEnd) -> None:
    for role in {*get_args(Role)} - {"rank", "worker"}:
        with pytest.raises(UsageError, match="no such certificate"):
            Identity(FromLauncher(), role, "n").context(server=False)
        with pytest.raises(ProcessError, match="does not hand"):
            handed.asked_of_launcher(role)
    launcher.close()


def test_a_leaf_is_asked_for_again_and_the_old_one_serves_meanwhile(
    launcher: LauncherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, now = Identity(FromLauncher(), "rank", ""), time.time()
    first = own.context(server=False)
    assert own.context(server=False) is first
    monkeypatch.setattr("ckptd.base.net.tls.time.time", lambda: now + LEAF_S * 0.6)
    second = own.context(server=False)
    assert second is not first
    launcher.close()
    monkeypatch.setattr("ckptd.base.net.tls.time.time", lambda: now + LEAF_S * 1.5)
    assert own.context(server=False) is second


def test_without_a_launcher_the_environment_has_the_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CKPTD_LAUNCHER", raising=False)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    assert (given_proof(), ranks_key()) == (None, None)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert given_proof() == SECRET.encode()
    assert ranks_key() == hand(SECRET, "n1", AskProof()).key
    monkeypatch.delenv(SECRET_VARIABLE)
    end = LauncherEnd(tmp_path / "l.sock", lambda *_: None)
    monkeypatch.setenv("CKPTD_LAUNCHER", str(end.path))
    assert (given_proof(), ranks_key()) == (None, None)  # it has none either
    end.close()
    with pytest.raises(ProcessError, match="does not hand"):
        ranks_key()


RANK = """
import json, os, socket, sys, time
import torch, torch.distributed as dist
import ckptd
from ckptd.base.net.connection import Connection, Hello, VERSION, _ANSWER, greet_server
from ckptd.base.net.handed import FromLauncher, asked_of_launcher, ranks_key
from ckptd.base.net.roles import DOORS
from ckptd.base.net.tls import identity
from ckptd.errors import CkptdError

out, root, port, job = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
checkpointer = ckptd.Checkpointer(root)
checkpointer.save(1, {"w": torch.ones(4)})
checkpointer.wait()


def wire():
    return Connection(socket.create_connection(("127.0.0.1", int(port)), 60), "controller", 60)


refused = {}
for role in ("rank", "worker"):
    for name in sorted(set().union(*DOORS["controller"].may.values())):
        one = wire()
        one.shake(identity(FromLauncher(), role, "", job), 60)
        one.send(Hello(VERSION, "controller", {"job": job}))
        order = {"type": "Order", "kind": "stop", "reason": "mine"}
        if name == "Envelope":
            order = {"type": "Broken", "node": "n", "generation": 1, "reason": "mine"}
        try:
            one.send({"type": name, "number": 1, "event": order})
        except CkptdError:
            pass  # it was refused already
        try:
            answer, _ = one.receive(_ANSWER, 60)
            refused[f"{role} {name}"] = [answer.kind, answer.text]
        except CkptdError as error:
            refused[f"{role} {name}"] = [error.kind, error.message]
        one.release()
for role in ("controller", "agent", "operator", "reader"):
    try:
        asked_of_launcher(role)
    except CkptdError as error:
        refused[role] = [error.kind, error.message]
for role in ("agent", "operator"):  # of an authority of its own, from all that it knows
    try:
        greet_server(wire(), ranks_key(), "controller", role=role, scope=job, wait_s=60)
    except CkptdError as error:
        refused[f"own {role}"] = [error.kind, error.message]
with open(f"{out}/{rank}.json.new", "w") as file:
    json.dump({"pid": os.getpid(), "refused": refused, "env": dict(os.environ)}, file)
os.rename(f"{out}/{rank}.json.new", f"{out}/{rank}.json")
while not os.path.exists(f"{out}/seen"):
    time.sleep(0.1)
checkpointer.close()
"""


def memory_has(pid: int, wanted: bytes) -> bool:
    """Whether anything that a process can write to has these bytes."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            first, end = (int(part, 16) for part in place.split("-"))
            held = b""
            for at in range(first, end, 1 << 24):
                try:
                    memory.seek(at)
                    piece = memory.read(min(1 << 24, end - at))
                except OSError:  # of the kernel, or gone meanwhile
                    break
                if wanted in held + piece:
                    return True
                held = piece[-len(wanted) :]
    return False


def open_files_have(pid: int, wanted: bytes) -> bool:
    """Whether a file that a process holds open, memory files too, has these bytes."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        name = f"/proc/{pid}/fd/{number}"
        if os.path.isfile(name) and os.path.getsize(name) < 1 << 24:
            with open(name, "rb") as file:
                if wanted in file.read():
                    return True
    return False


def below(pids: set[int]) -> set[int]:
    """Return these processes and all that descend from them."""
    found, parents = set(pids), dict[int, int]()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.dist
def test_no_rank_of_a_job_has_the_secret_or_gives_an_order(tmp_path: Path) -> None:
    secret, port, job = secrets.token_hex(16), free_port(), f"j{secrets.token_hex(4)}"
    script, out = tmp_path / "rank.py", tmp_path / "out"
    script.write_text(RANK)
    out.mkdir()
    more = {"OMP_NUM_THREADS": "1"}
    more |= dict.fromkeys(KEPT_FROM_RANKS, secret)
    words = ["--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--job", job]
    words += ["--log", str(tmp_path / "log"), str(script)]
    words += [str(out), str(tmp_path / "root"), str(port), job]
    launcher = subprocess.Popen(
        [*COMMAND, "run", "--no-watch", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | more,
    )
    try:
        said: list[dict[str, Any]] = []
        for rank in range(2):
            while not (out / f"{rank}.json").exists():
                assert launcher.poll() is None, launcher.communicate()[0]
                time.sleep(0.1)
            said.append(json.loads((out / f"{rank}.json").read_text()))
        theirs = below({rank["pid"] for rank in said})
        for pid in theirs:
            for part in ("environ", "cmdline"):
                assert secret.encode() not in Path(f"/proc/{pid}/{part}").read_bytes(), part
            assert not open_files_have(pid, secret.encode())
            assert not memory_has(pid, secret.encode())
        assert len(theirs) > 2  # the processes that write are among them
        assert memory_has(launcher.pid, secret.encode())  # so it is found where it is
    finally:
        (out / "seen").touch()
        printed = launcher.communicate(timeout=PATIENCE_S)[0]
    assert launcher.returncode == 0, printed
    assert "generation 2" not in printed  # nothing that they asked for was done
    for rank in said:
        assert not {*KEPT_FROM_RANKS} & {*rank["env"]}
        assert secret not in rank["env"].values()
        refused = rank["refused"]
        for role in ("rank", "worker"):
            at_door = [words for asked, words in refused.items() if asked.startswith(f"{role} ")]
            assert (
                at_door == [["permission", f"a certificate of role {role} opens nothing here"]] * 8
            ), at_door
        for role in ("controller", "agent", "operator", "reader"):
            assert "does not hand" in refused[role][1]
        for role in ("agent", "operator"):
            assert refused[f"own {role}"][0] in ("permission", "not-the-controller")
