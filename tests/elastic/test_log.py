"""The log in a folder, in memory, and in a real etcd."""

from __future__ import annotations

import http.client
import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptd.elastic.etcd import EtcdLog
from ckptd.elastic.log import FOLDER, MembershipLog, StoreLog, entry_key, entry_number
from ckptd.elastic.membership import encode_record
from ckptd.elastic.policy import Shape
from ckptd.errors import ConflictError, CorruptError, TransientStoreError, UsageError
from ckptd.store import open_store
from tests.elastic.test_membership import record

ETCD = shutil.which("etcd")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if ETCD is None:
        pytest.skip("there is no etcd here (Debian: apt install etcd-server)")
    folder = tmp_path_factory.mktemp("etcd")
    for _ in range(3):  # somebody else may take a port first
        client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
        command = [ETCD, "--data-dir", str(folder / client[-5:]), "--listen-client-urls", client]
        command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            if _answers(client, process):
                yield client
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


@pytest.fixture(params=["folder", "etcd"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> MembershipLog:
    if request.param == "folder":
        return StoreLog(open_store(str(tmp_path)))
    return EtcdLog([request.getfixturevalue("etcd")], f"jobs/{tmp_path.name}-{id(request)}")


def test_records_are_read_in_their_order(log: MembershipLog) -> None:
    assert log.read() == []
    records = [record(Shape(dp=2), k + 1, step=k) for k in range(70)]
    for number, one in enumerate(records):
        log.append(one, number)
    assert log.read() == records


def test_one_of_two_wins(log: MembershipLog) -> None:
    log.append(record(Shape(), 1, by="a"), 0)
    with pytest.raises(ConflictError) as caught:
        log.append(record(Shape(), 1, by="b"), 0)
    assert caught.value.kind == "log-taken"
    assert [r.by for r in log.read()] == ["a"]


def test_what_was_written_and_not_heard_of_may_be_written_again(log: MembershipLog) -> None:
    one = record(Shape(), 1, by="a")
    log.append(one, 0)
    if isinstance(log, EtcdLog):  # a local folder loses no answers
        log.append(one, 0)
    assert log.read() == [one]


def test_of_many_at_once_one_wins(log: MembershipLog) -> None:
    outcomes = []

    def append(name: str) -> None:
        try:
            log.append(record(Shape(), 1, by=name), 0)
        except ConflictError:
            return
        outcomes.append(name)

    threads = [threading.Thread(target=append, args=(f"c{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [r.by for r in log.read()]


def test_a_gap_is_an_error(log: MembershipLog) -> None:
    log.append(record(Shape(), 1), 0)
    log.append(record(Shape(), 3), 2)
    with pytest.raises(CorruptError, match="missing"):
        log.read()


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    log = StoreLog(open_store(str(tmp_path)))
    log.append(record(Shape(), 1), 0)
    path = tmp_path / FOLDER / entry_key(0)
    path.write_bytes(encode_record(record(Shape(), 1))[:-3])
    with pytest.raises(CorruptError) as caught:
        log.read()
    assert entry_key(0) in str(caught.value.where)


def test_other_objects_are_none_of_the_log(tmp_path: Path) -> None:
    log = StoreLog(open_store(str(tmp_path)))
    log.append(record(Shape(), 1), 0)
    (tmp_path / FOLDER / "notes.txt").write_text("mine")
    (tmp_path / FOLDER / "1.json").write_text("{}")
    assert len(log.read()) == 1


@pytest.mark.parametrize(
    "name", ["1.json", "000000000001", "-00000000001.json", "٠" * 12 + ".json"]
)
def test_names_that_are_no_records(name: str) -> None:
    assert entry_number(name) is None
    assert entry_number(entry_key(7)) == 7


def test_an_etcd_that_is_away_is_told(etcd: str) -> None:
    away = f"http://127.0.0.1:{_free_port()}"
    with pytest.raises(TransientStoreError, match="no member"):
        EtcdLog([away], "jobs/a").read()
    log = EtcdLog([away, etcd], "jobs/away")
    log.append(record(Shape(), 1), 0)
    assert len(log.read()) == 1


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:2379", "ftp://a", "http://", "http://a:b", "http://[::1"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        EtcdLog([endpoint], "jobs")


@pytest.mark.parametrize(
    "answer", ["[]", "{", '{"kvs":[{"value":"YQ=="}]}', '{"kvs":7}', "[" * 9999]
)
def test_an_etcd_that_answers_nonsense_is_told(answer: str) -> None:
    with _answering(answer) as url, pytest.raises(TransientStoreError, match="no member"):
        EtcdLog([url], "jobs/a").read()


def test_an_etcd_that_repeats_itself_is_told() -> None:
    pair = '{"key":"am9icy9hLzAwMDAwMDAwMDAwMC5qc29u","value":""}'
    with _answering(f'{{"kvs":[{pair}],"more":true}}') as url, pytest.raises(CorruptError):
        EtcdLog([url], "jobs/a").read()


def test_a_transaction_that_says_nothing_has_not_created() -> None:
    with _answering("{}") as url, pytest.raises(ConflictError):
        EtcdLog([url], "jobs/a").append(record(Shape(), 1), 0)


@contextmanager
def _answering(answer: str) -> Iterator[str]:
    class Nonsense(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nonsense) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
