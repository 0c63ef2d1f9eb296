"""Verbs on systems other than Linux, played by a Python that lacks what macOS lacks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.roots import make_root
from tests.processes import PATIENCE_S

# Modules that look at the platform when they are imported have other forms there: they come first.
DARWIN = """
import asyncio, fcntl, mmap, multiprocessing, os, psutil, select, shutil, signal, socket, subprocess
import sys, sysconfig, tempfile, time, urllib.request
sysconfig.get_config_vars()
if "torch" in sys.argv:
    import torch, torch._dynamo.config
sys.platform = "darwin"
for module, names in {
    os: "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING eventfd posix_fadvise posix_fallocate"
    " POSIX_FADV_DONTNEED POSIX_FADV_SEQUENTIAL sched_getaffinity sched_setaffinity preadv2"
    " pwritev2 copy_file_range splice pidfd_open setns unshare getrandom O_DIRECT O_PATH",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo",
    mmap: "MAP_POPULATE MAP_STACK MADV_HUGEPAGE MADV_DONTFORK MADV_DODUMP MADV_DONTDUMP",
    socket: "AF_NETLINK AF_VSOCK SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT",
    select: "epoll EPOLLIN",
    fcntl: "F_ADD_SEALS F_SEAL_SHRINK F_SEAL_GROW F_SEAL_SEAL F_SETLEASE F_GETLEASE F_OFD_SETLK",
    time: "CLOCK_BOOTTIME",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""

TOOLS = """
from ckptd.cli.main import run
root = sys.argv[1]
for words in (
    ["ls", root], ["inspect", root], ["verify", root], ["diff", root, root],
    ["cp", root, root + "-copy"], ["export", root, root + "-hf", "--section", "model"],
    ["reshard", root, root + "-re", "--to", "ddp"], ["gc", root, "--dry-run"],
    ["pin", root], ["rollback", root + "@10"], ["doctor", root, "--quick"], ["agent", "status"],
):
    code = run(words)
    assert code == 0, (words, code)
for line in ("run x.py", "watch -- true", "serve", "controller", "agent run"):
    words = line.split()
    assert run(words) == 5, words
    assert run([words[0], "--help"]) == 0
"""

SAVES = """
import ckptd
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "rng": ckptd.Rng()}
with ckptd.Checkpointer(sys.argv[1]) as ck:
    model(torch.rand(4)).sum().backward()
    optimizer.step()
    ck.save(7, state).durable()
    assert ck.load(state) == 7
"""


def _played(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", DARWIN + program, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_checkpoints_are_read_and_what_needs_linux_says_so(tmp_path: Path) -> None:
    said = _played(TOOLS, make_root(tmp_path / "root")).stderr
    assert "internal error" not in said
    assert said.count("needs Linux") == 5


@pytest.mark.slow
def test_a_process_saves_and_loads(tmp_path: Path) -> None:
    _played(SAVES, str(tmp_path / "root"), "torch")
