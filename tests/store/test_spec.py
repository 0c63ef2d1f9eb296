from __future__ import annotations

import uuid

import pytest

from ckptd.errors import UsageError
from ckptd.store import (
    FaultRule,
    FaultSpec,
    MeterSpec,
    RetrySpec,
    StoreSpec,
    ThrottleSpec,
    open_store,
)
from ckptd.store.base import innermost
from ckptd.store.fault import Fault
from ckptd.store.wrap import Meter, Retry, Throttle


def full_spec() -> StoreSpec:
    return StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(
        FaultSpec((FaultRule("error", op="get", times=1),), inner=True),
        MeterSpec(),
        ThrottleSpec(1e9, None),
        RetrySpec(deadline_s=5.0, first_s=0.0),
    )


def test_wrappers_are_built_innermost_first() -> None:
    store = full_spec().open()
    assert isinstance(store, Retry)
    assert isinstance(store.inner, Throttle)
    assert isinstance(store.inner.inner, Meter)
    assert isinstance(store.inner.inner.inner, Fault)
    assert innermost(store).url == store.url


def test_description_goes_round() -> None:
    spec = full_spec()
    assert spec.open().describe() == spec
    assert StoreSpec.from_json(spec.to_json()) == spec
    assert StoreSpec.from_json(spec.to_json().decode()) == spec


def test_options_that_are_defaults_are_left_out() -> None:
    spec = StoreSpec("/some/where", {"threads": 4, "direct": False})
    assert spec.open().describe() == StoreSpec("/some/where", {"direct": False})


def test_secrets_do_not_show() -> None:
    options = {"key": "AKIA", "secret": "hush", "token": "t", "endpoint_url": "http://x"}
    spec = StoreSpec("s3://bucket/run", {**options, "client": {"password": "p", "port": 1}})
    for text in (repr(spec), str(spec), f"{spec.redacted()}"):
        assert not {"AKIA", "hush", "'t'", "'p'"} & set(text.replace(",", " ").split())
        assert "AKIA" not in text
        assert "hush" not in text
        assert "http://x" in text
        assert "'port': 1" in text
    assert "pass" not in repr(StoreSpec("sftp://user:pass@host/x"))
    assert b"hush" in spec.to_json(), "the other process needs it"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"url": 1}',
        '{"url": "/x", "unknown": 1}',
        '{"url": "/x", "wrappers": [{"type": "exec"}]}',
        '{"url": "/x", "wrappers": [{"type": "fault", "rules": [{"action": "rm"}]}]}',
        '{"url": "/x", "wrappers": [{"type": "retry", "deadline_s": "soon"}]}',
    ],
)
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        StoreSpec.from_json(text)
    assert "invalid description of a store" in caught.value.message


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("/x", {"nonsense": 1}),
        ("/x", {"threads": "many"}),
        ("memory://x", {"anything": 1}),
        ("s3://bucket", {"secrets": "x"}),
        ("s3://bucket", {"parallel": 0}),
        ("s3://bucket", {"part_bytes": 1024}),
    ],
)
def test_options_are_checked(url: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url, **options)
    assert caught.value.message in (
        "an option is out of range",
        "the store does not take these options",
    )
