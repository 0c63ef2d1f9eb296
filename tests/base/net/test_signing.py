from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.base.net import signing
from ckptd.base.net.signing import (
    access_token,
    check_answer,
    check_request,
    check_secret,
    checked_secret,
    job_secret,
    new_challenge,
    secret_path,
    sign_answer,
    sign_request,
)
from ckptd.errors import RefusedError, StoreError, UsageError
from tests.store.places import refuse_link

SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.SECRET_VARIABLE, raising=False)


def test_secret_is_made_once_and_belongs_to_one_job(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: job_secret("a", tmp_path), range(8)))
    assert len(made) == 1
    assert job_secret("b", tmp_path) not in made
    path = secret_path("a", tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        secret_path(job, tmp_path).name for job in "ab"
    )


def test_a_folder_without_hard_links_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_link)
    with pytest.raises(StoreError) as caught:
        job_secret("a", tmp_path)
    assert "CKPTD_SECRET" in str(caught.value.hint)
    assert [*tmp_path.iterdir()] == []


def test_secret_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(signing.SECRET_VARIABLE, "some random text")
    assert job_secret("a", tmp_path) == b"some random text"
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(signing.SECRET_VARIABLE, "short")
    with pytest.raises(UsageError) as caught:
        job_secret("a", tmp_path)
    assert "the secret has the wrong length" in caught.value.message


@pytest.mark.parametrize(
    "weak",
    [
        "passwordpassword",
        "PasswordpAssword1",
        "x" * 40,
        "12345678" * 4,
        "changemechangeme",
        "ab" * 99,
    ],
)
def test_a_short_text_that_repeats_is_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weak: str
) -> None:
    monkeypatch.setenv(signing.SECRET_VARIABLE, weak)
    with pytest.raises(UsageError, match="too easy to guess") as caught:
        job_secret("a", tmp_path)
    assert weak not in str(caught.value)
    with pytest.raises(UsageError):
        check_secret(weak.encode().hex(), "ckptd://h:1")


def test_random_secrets_are_taken() -> None:
    dice = random.Random(7)
    for _ in range(1000):
        raw = dice.randbytes(16)
        for text in (raw, raw.hex().encode(), raw.hex()[:16].encode()):
            assert checked_secret(text, "here") == text


@pytest.mark.parametrize("how", ["open", "link", "folder"])
def test_file_that_others_could_have_made_is_refused(tmp_path: Path, how: str) -> None:
    path = secret_path("a", tmp_path)
    if how == "open":
        path.write_bytes(SECRET)
        path.chmod(0o644)
    elif how == "link":
        (tmp_path / "other").write_bytes(SECRET)
        path.symlink_to(tmp_path / "other")
    else:
        path.mkdir()
    with pytest.raises(RefusedError) as caught:
        job_secret("a", tmp_path)
    assert "the file of the job's secret is accessible to others" in caught.value.message


def test_file_that_holds_too_little_is_refused(tmp_path: Path) -> None:
    fd = os.open(secret_path("a", tmp_path), os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"abc\n")
    os.close(fd)
    with pytest.raises(UsageError):
        job_secret("a", tmp_path)


@given(body=st.binary(max_size=200))
def test_signed_message_passes(body: bytes) -> None:
    challenge = new_challenge()
    mac = sign_request(SECRET, "POST", "/api/v1/sheets", challenge, body)
    check_request(mac, SECRET, "POST", "/api/v1/sheets", challenge, body)
    check_answer(sign_answer(SECRET, mac, body), SECRET, mac, body)


@pytest.mark.parametrize(
    "other",
    [
        {"secret": b"another secret !"},
        {"method": "PUT"},
        {"path": "/api/v1/found"},
        {"body": b"other"},
        {"header": None},
        {"header": ""},
        {"header": "v2 a b"},
        {"header": "v1"},
        {"header": "v1 \udcff\x00 é"},
    ],
)
def test_whatever_was_changed_does_not_pass(other: dict[str, object]) -> None:
    said = {"secret": SECRET, "method": "POST", "path": "/p", "challenge": "c", "body": b"b"}
    header = sign_request(**said)  # type: ignore[arg-type]
    with pytest.raises(RefusedError):
        check_request(**{"header": header, **said, **other})  # type: ignore[arg-type]


def test_another_life_of_the_daemon_is_told_apart() -> None:
    header = sign_request(SECRET, "POST", "/p", "before", b"")
    with pytest.raises(RefusedError) as caught:
        check_request(header, SECRET, "POST", "/p", "after", b"")
    assert caught.value.kind == "stale-mac"


def test_answer_belongs_to_its_request() -> None:
    answer = sign_answer(SECRET, "v1 c one", b"orders")
    for mac, body in (("v1 c two", b"orders"), ("v1 c one", b"other")):
        with pytest.raises(RefusedError) as caught:
            check_answer(answer, SECRET, mac, body)
        assert caught.value.kind == "bad-mac"
    with pytest.raises(RefusedError):
        check_answer(None, SECRET, "v1 c one", b"orders")


def test_token_is_not_the_secret() -> None:
    token = access_token(SECRET)
    assert token == access_token(SECRET) != access_token(SECRET + b"x")
    assert SECRET.decode() not in token
