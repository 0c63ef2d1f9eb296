"""A real etcd, started by the test; skipped, and said so, where there is none."""

from __future__ import annotations

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.processes import free_port

__all__ = ["etcd", "free_port"]

ETCD = shutil.which("etcd")


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return ``HOST:PORT`` of its only member."""
    if ETCD is None:
        pytest.skip("there is no etcd here (Debian: apt install etcd-server)")
    folder = tmp_path_factory.mktemp("etcd")
    for _ in range(3):  # somebody else may take a port first
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        command = [ETCD, "--data-dir", str(folder / client[-5:]), "--listen-client-urls", client]
        command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            if _answers(client, process):
                yield client.removeprefix("http://")
                return
        finally:
            process.kill()
            process.wait()
    pytest.fail((folder / "log").read_text()[-2000:])


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
        try:
            connection.request("GET", "/health")
            if b"true" in connection.getresponse().read():
                return True
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    return False
