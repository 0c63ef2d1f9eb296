"""S3 servers for tests: moto (quick) and Ceph's radosgw (real), each in processes of its own.

Import the fixtures into a ``conftest.py``; each gives the options for
``open_store(s3_url(), **options)``. `MOTO` and `RADOSGW` are parameters that name the fixtures, for
``request.getfixturevalue``.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["MOTO", "RADOSGW", "s3_moto", "s3_radosgw", "s3_url", "start_moto"]

BUCKET = "ckptd-test"
_START_S = 900  # installing packages included, when that is needed
MOTO = pytest.param("s3_moto", id="moto", marks=pytest.mark.s3)
RADOSGW = pytest.param(
    "s3_radosgw", id="radosgw", marks=[pytest.mark.s3, pytest.mark.timeout(_START_S + 120)]
)
_SCRIPT = Path(__file__).parent.parent / "scripts" / "s3-server"
_NO_SERVER = 3

# Ends with its owner, so that it never outlives the tests, however they end.
#
# One request at a time: moto checks `If-None-Match` and then stores, without a lock, so that on a
# busy machine two racing creators both win; and it answers 500 when an upload ends in between.
# A real service does neither (radosgw, in the same tests, is not serialised).
#
# S3 alone: moto's whole server looks through its folders for the service of every request, which
# takes a third of the time of a small one. It also parses the date of each object that it lists.
_MOTO = """
import functools, logging, os, sys, threading, time
from moto.core import serialize
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
serialize.parse_to_aware_datetime = functools.lru_cache(serialize.parse_to_aware_datetime)
moto = create_backend_app("s3")
turn = threading.Lock()
def one_at_a_time(environ, start_response):
    with turn:
        return list(moto(environ, start_response))
server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
try:
    while not os.kill(int(sys.argv[1]), 0):
        time.sleep(0.2)
except ProcessLookupError:
    pass
"""


def s3_url() -> str:
    """Return a new, empty place in the servers' bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def _make_bucket(options: dict[str, Any]) -> dict[str, Any]:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name=options["region"],
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    return options


def start_moto(owner: int) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start a moto server that ends with the process `owner`; return it, and a store's options."""
    pytest.importorskip("moto.server", reason="the test extra is not installed")
    server = subprocess.Popen(
        [sys.executable, "-c", _MOTO, str(owner)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    with server.stdout as said:
        port = int(said.readline())
    options = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "key": "test",
        "secret": "test",
        "region": "us-east-1",
    }
    return server, _make_bucket(options)


_motos: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="session")
def s3_moto(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a store on a moto server in a process of its own.

    It takes 2 s of CPU to start, so the worker processes of one run share it.
    """

    def start(owner: int) -> dict[str, Any]:
        server, options = start_moto(owner)
        _motos.append(server)
        return options

    return _of_the_run(tmp_path_factory, "moto", start)


def _of_the_run(
    factory: pytest.TempPathFactory, name: str, start: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Return what one process of a run has started, for the process that leads the run."""
    folder, leader = factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The workers are children of the process that leads the run, and their folders share one.
        folder, leader = folder.parent, os.getppid()
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = folder / f"{name}.json"
        if not answer.exists():
            answer.write_text(json.dumps(start(leader)))
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


@pytest.fixture(scope="session")
def s3_radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options of a store on a real Ceph gateway; skips where none can be started.

    It takes 15 s to start, so the worker processes of one run share it; it ends with the run.
    """
    if os.environ.get("CKPTD_TEST_RADOSGW") == "0":
        pytest.skip("CKPTD_TEST_RADOSGW=0")
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield _options(_start(base / "s3-server", os.getpid()))
        subprocess.run([_SCRIPT, "stop", base / "s3-server"], timeout=60, check=False)
        return
    found = _of_the_run(
        tmp_path_factory, "s3-server", lambda owner: _start(base.parent / "s3-server", owner)
    )
    yield _options(found)


def _start(folder: Path, owner: int) -> dict[str, Any]:
    """Start the gateway and make the bucket; returns options, or why there is no server."""
    try:
        done = subprocess.run(
            [_SCRIPT, "start", folder, str(owner)],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
    except OSError as error:
        return {"skip": f"scripts/s3-server does not run here: {error}"}
    if done.returncode == _NO_SERVER:
        reasons = [n for n in done.stderr.splitlines() if n.startswith("s3-server:")]
        return {"skip": reasons[-1] if reasons else "scripts/s3-server gave no reason"}
    assert done.returncode == 0, done.stderr
    return _make_bucket(json.loads(done.stdout))


def _options(found: dict[str, Any]) -> dict[str, Any]:
    if "skip" in found:
        pytest.skip(found["skip"])
    return found
