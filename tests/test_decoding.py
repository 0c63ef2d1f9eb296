"""Decoding for the first time, in several threads at once; and what a crash leaves behind."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.decoding import Decoder, converter, json_decoder, msgpack_decoder
from ckptd.errors import CorruptError


def test_one_decoder_is_made_for_a_type() -> None:
    assert msgpack_decoder(dict[str, int]) is msgpack_decoder(dict[str, int])
    assert json_decoder(dict[str, int], strict=False).decode(b'{"a": "1"}') == {"a": 1}
    assert converter(tuple[int, str])([1, "a"]) == (1, "a")


@pytest.mark.parametrize("name", ["ckptd", "ckptd.elastic", "ckptd.monitor"])
@pytest.mark.parametrize("kind", [str, Path, ValueError])
def test_what_is_logged_of_a_file_begins_no_line_and_steers_no_terminal(
    caplog: pytest.LogCaptureFixture, name: str, kind: Callable[[str], object]
) -> None:
    text = "layer\n2026-11-29 ERROR forged\x1b[2J\u202e"
    logging.getLogger(name).warning("%d: %s", 7, kind(text))
    assert caplog.messages == ["7: layer\n    2026-11-29 ERROR forged\ufffd[2J\ufffd"]
    caplog.clear()
    error = CorruptError("a file is damaged", where="a\nb", hint="look")
    logging.getLogger(name).warning("%s, %s, %r", error, "plain", kind("plain"))
    assert caplog.messages == [f"{error}, plain, {kind('plain')!r}"]


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=[pytest.mark.long])])
def test_eight_threads_of_a_fresh_process_decode_the_same_type(count: int) -> None:
    """Before decoders were made at import, 141 of 500 such processes ended with SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.first_decode", str(count)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"0": count}, done.stderr


def test_a_crash_leaves_the_stacks_of_all_threads() -> None:
    """As a writing process's: the reason why it is gone stands in its log."""
    script = "from ckptd.crashes import report_crashes as r; r(); __import__('os').abort()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert 'File "<string>", line 1' in done.stderr


@pytest.mark.parametrize("decoder", [json_decoder(Any), msgpack_decoder(Any)])
@pytest.mark.parametrize("raw", [b'"\xff"', b"\xa1\xff", b"[" * 100_000, b"\x91" * 100_000, b""])
def test_bytes_of_any_wrong_form_have_one_error(decoder: Decoder[Any], raw: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoder.decode(raw)
