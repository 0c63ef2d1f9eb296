"""Every store of ours, bare and wrapped, keeps the contract."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.store import FaultSpec, MeterSpec, RetrySpec, StoreSpec, ThrottleSpec
from ckptd.testing.store import StoreContract
from tests.servers import MOTO, RADOSGW, s3_url


class TestLocal(StoreContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(str(tmp_path / "not" / "yet" / "there"))


class _Smaller(StoreContract):
    """`TestLocal` has the contract's sizes, `TestS3` its listing; here: three blocks, a page."""

    big_bytes = (18 << 20) + 4099
    long_listing = 120


class TestLocalUrlBuffered(_Smaller):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(f"file://{tmp_path}/with space%20", {"direct": False, "threads": 1})


class TestLocalOnTmpfs(_Smaller):
    @pytest.fixture
    def spec(self) -> Iterator[StoreSpec]:
        if not Path("/dev/shm").is_dir():
            pytest.skip("no /dev/shm here")
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield StoreSpec(folder)


class TestMemory(_Smaller):
    @pytest.fixture
    def spec(self) -> StoreSpec:
        return StoreSpec(f"memory://{uuid.uuid4().hex}")


class TestFsspecFile(_Smaller):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(f"fsspec+file://{tmp_path}/root")


class TestFsspecMemory(_Smaller):
    @pytest.fixture
    def spec(self) -> StoreSpec:
        return StoreSpec(f"fsspec+memory://{uuid.uuid4().hex}", {"single_writer": True})


class TestWrapped(_Smaller):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec(str(tmp_path / "root")).wrapped(
            FaultSpec(inner=True, log=str(tmp_path / "log")),
            MeterSpec(),
            ThrottleSpec(write_bytes_per_s=4e9, read_bytes_per_s=4e9),
            RetrySpec(),
        )


class TestRetriedMemory(_Smaller):
    @pytest.fixture
    def spec(self) -> StoreSpec:
        return StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(RetrySpec(), MeterSpec())


class _S3Contract(StoreContract):
    """Parts of 5 MiB: four of them, where the contract's own parts are larger."""

    big_bytes = (16 << 20) + 4099

    @pytest.fixture
    def server(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        options: dict[str, Any] = request.getfixturevalue(request.param)
        return options

    @pytest.fixture
    def spec(self, server: dict[str, Any]) -> StoreSpec:
        return StoreSpec(s3_url(), {**server, "part_bytes": 5 << 20})


@pytest.mark.parametrize("server", [RADOSGW], indirect=True)
class TestS3(_S3Contract):
    pass


@pytest.mark.parametrize("server", [MOTO], indirect=True)
class TestS3Moto(_S3Contract):
    long_listing = 20
    race_processes = 2


@pytest.mark.long
@pytest.mark.parametrize("server", [MOTO], indirect=True)
class TestS3Wrapped(_S3Contract):
    """What `TestWrapped` shows of the wrappers and `TestS3Moto` of the store, together."""

    long_listing = 20
    race_processes = 2

    @pytest.fixture
    def spec(self, server: dict[str, Any]) -> StoreSpec:
        return StoreSpec(s3_url(), server).wrapped(FaultSpec(inner=True), RetrySpec())


@pytest.mark.parametrize("server", [MOTO], indirect=True)
class TestFsspecS3(_S3Contract):
    """The generic store on an object store: what a user of gs:// or az:// gets, less the race."""

    long_listing = 20

    @pytest.fixture
    def spec(self, server: dict[str, Any]) -> StoreSpec:
        options = {"key": server["key"], "secret": server["secret"]}
        options |= {"endpoint_url": server["endpoint_url"]}
        return StoreSpec(f"fsspec+{s3_url()}", options)
