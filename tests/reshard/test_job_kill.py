"""A reshard that is killed at random moments and started again ends in the same bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptd.store import open_store
from tests.processes import lives, until
from tests.reshard.llama import HF, MEGATRON, program, resharded, save, values

FILES = 5
BIG = 12
STAGES = """
space s { L{l}.w[o i] }
mesh P = pp:5
layout whole of s on none { l.{l}.w = L{l}.w[o i] }
layout stages of s on P { stage.{l@pp}.w = L{l}.w[o i] }
"""


@pytest.fixture
def zygote() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.reshard.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(zygote: subprocess.Popen[str], args: list[str]) -> int:
    """Start a reshard and return its process."""
    assert zygote.stdin is not None
    zygote.stdin.write(json.dumps(args) + "\n")
    zygote.stdin.flush()
    return int(answer(zygote, "started"))


def answer(zygote: subprocess.Popen[str], word: str) -> str:
    assert zygote.stdout is not None
    line = zygote.stdout.readline().split()
    assert line[0] == word, line
    return line[1]


def data_of(root: Path) -> dict[str, bytes]:
    """Return every object below data/, by name; what a killed put left is none."""
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted((root / "data").rglob("*"))
        if p.is_file() and not p.name.startswith("~")
    }


def parts(root: Path) -> list[Path]:
    """Return what complete files left."""
    return list(root.glob("data/*/parts/f*"))


def wait_for_part(root: Path, known: int, child: int) -> None:
    """Return when another file is complete, or the process has ended."""
    until(lambda: len(parts(root)) > known or not lives(child), "another file is complete")


@pytest.mark.timeout(600)  # it reshards two dozen times, however long the machine takes
@pytest.mark.parametrize("wanted_kills", [8, pytest.param(40, marks=pytest.mark.long)])
def test_kills_end_in_the_same_bytes(
    wanted_kills: int, tmp_path: Path, zygote: subprocess.Popen[str]
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    rng = np.random.default_rng(1)
    shape = (1024, BIG * 256)
    with open_store(source) as store:
        save(store, {f"l.{i}.w": rng.random(shape, dtype=np.float32) for i in range(FILES)})
    lay = tmp_path / "stages.lay"
    lay.write_text(STAGES)
    # Files that have nothing in common are written one after the other, in several rounds each.
    args = ["reshard", str(source), str(target), "--to", f"{lay}:stages", "--budget", "32MiB"]
    args += ["--from", f"{lay}:whole"]
    ask(zygote, [*args, "--dry-run"])  # it has imported everything when it answers
    assert answer(zygote, "ended") == "0"
    begun = time.monotonic()
    ask(zygote, args)
    assert answer(zygote, "ended") == "0"
    whole_s = time.monotonic() - begun
    wanted = data_of(target)
    assert len([n for n in wanted if n.endswith(".safetensors")]) == FILES
    kills, ends, resumed = 0, 0, 0
    moments = random.Random(11)
    shutil.rmtree(target)
    while kills < wanted_kills or not (resumed or kills > 40 + wanted_kills):
        before = len(parts(target))
        child = ask(zygote, args)
        if kills % 2:  # the machine may be slower now: so that some files are complete in any case
            wait_for_part(target, before, child)
        if kills % 4 != 1:  # every other time at once, while files are still to be written
            time.sleep(moments.uniform(0, whole_s))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        code = int(answer(zygote, "ended"))
        resumed += before > 0
        if code == 0:
            ends += 1
            whole_s *= 0.8  # or it is quicker
            assert data_of(target) == wanted
            shutil.rmtree(target)
        else:
            assert code == -signal.SIGKILL
            kills += 1
    ask(zygote, args)
    assert answer(zygote, "ended") == "0"
    assert data_of(target) == wanted
    print(f"{kills} kills, {ends + 1} reshards ended, {resumed} runs went on with complete files")
    assert resumed


def test_a_target_of_fused_tensors_after_kills(
    tmp_path: Path, zygote: subprocess.Popen[str]
) -> None:
    source, target, calm = tmp_path / "source", tmp_path / "target", tmp_path / "calm"
    with open_store(source) as store:
        save(store, values())
    resharded(source, calm, program(*MEGATRON), program(*HF))
    args = ["reshard", str(source), str(target), "--from", HF[0], "--to", MEGATRON[0]]
    args += [x for rule in MEGATRON[1:] for x in ("-e", rule)]
    moments = random.Random(3)
    code = -1
    for _ in range(60):
        child = ask(zygote, args)
        time.sleep(moments.uniform(0, 0.15))
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        code = int(answer(zygote, "ended"))
        if code == 0:
            break
    if code:
        ask(zygote, args)
        assert answer(zygote, "ended") == "0"
    bodies = {
        n.rpartition("/")[2]: b for n, b in data_of(target).items() if n.endswith(".safetensors")
    }
    others = {
        n.rpartition("/")[2]: b for n, b in data_of(calm).items() if n.endswith(".safetensors")
    }
    assert bodies == others
