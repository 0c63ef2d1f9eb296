"""S3 servers on this machine and plain s3fs, for the benches that compare with them.

`server` starts moto (quick to start, slow, one process of Python) or Ceph's gateway (a real one,
through ``scripts/s3-server``), each in processes of its own that end with this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

KINDS = ("moto", "radosgw")
BUCKET = "ckptd-bench"
_SCRIPT = common.HERE.parent / "scripts" / "s3-server"
_NO_SERVER = 3
_START_S = 120.0

Options = dict[str, Any]


@contextlib.contextmanager
def server(kind: str, bind: str = "127.0.0.1") -> Iterator[Options | str]:
    """Give the options of a store with an empty bucket, or why there is no such server."""
    with _moto(bind) if kind == "moto" else _radosgw() as options:
        if not isinstance(options, str):
            filesystem(options).call_s3("create_bucket", Bucket=BUCKET)
        yield options


def filesystem(options: Options) -> Any:
    """Return s3fs on a server, with its own defaults for everything else."""
    import s3fs

    return s3fs.S3FileSystem(**reach(options))


def empty(options: Options) -> None:
    """Delete all objects: servers keep them in memory, and a full gateway answers nothing."""
    store = filesystem(options)
    for found in store.ls(BUCKET, detail=False):
        store.rm(found, recursive=True)


def reach(options: Options) -> Options:
    """Return the options of s3fs for a server."""
    return {
        "key": options["key"],
        "secret": options["secret"],
        "endpoint_url": options["endpoint_url"],
        "client_kwargs": {"region_name": options["region"]},
        "skip_instance_cache": True,
        "use_listings_cache": False,
    }


@contextlib.contextmanager
def _moto(bind: str) -> Iterator[Options | str]:
    with socket.create_server((bind, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", bind, "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, **quiet) as process:
        try:
            answers = _wait_for(port, process)
            yield _options(port) if answers else "moto's server does not start"
        finally:
            process.kill()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        time.sleep(0.1)
    return False


def _options(port: int) -> Options:
    place = {"endpoint_url": f"http://127.0.0.1:{port}", "region": "us-east-1"}
    return {**place, "key": "test", "secret": "test"}


@contextlib.contextmanager
def _radosgw() -> Iterator[Options | str]:
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-s3-") as base:
        folder = Path(base) / "server"
        started = subprocess.run(
            [_SCRIPT, "start", folder, str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if started.returncode:
            said = [x for x in started.stderr.splitlines() if x.startswith("s3-server:")]
            if started.returncode != _NO_SERVER:
                raise SystemExit(started.stderr[-3000:])
            yield said[-1] if said else "scripts/s3-server gave no reason"
            return
        try:
            yield json.loads(started.stdout)
        finally:
            subprocess.run([_SCRIPT, "stop", folder], timeout=60, check=False)
