"""Runs the examples: ``python -m tests.examples_watched.run FOLDER [--only NAME] [--out FILE]``.

Each script is run twice in a copy of its folder, as it is: by torchrun, and by ``ckptd watch --
torchrun``. What both print and every step of their optimizers must be the same, there must be no
incident, and collectives must have been seen. FOLDER holds clones of ``pytorch/examples`` as
``examples`` and of ``pytorch/tutorials`` as ``tutorials``; what is absent is left out, and said.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import textwrap
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ckptd.base.net.signing import access_token
from tests.examples_watched.standin import environment

__all__ = ["EXAMPLES", "Example", "Row", "code_of", "main", "run"]

LIMIT_S = 900
_CLI = "import sys; from ckptd.cli.main import main; main()"
_CODE = re.compile(r"^\.\. code(?:-block)?:: python\n((?:\n|[ \t]+.*\n)+)", re.MULTILINE)
# Numbers that differ from run to run: processes, ports, times.
_CHANGING = re.compile(r"\d\d/\d\d/\d{4} \d\d:\d\d:\d\d [AP]M|\[\d+\]|'MASTER_PORT': '\d+'")


@dataclass(frozen=True)
class Example:
    """One script.

    Attributes
    ----------
    name
        Its path in FOLDER.
    ranks
        How many torchrun starts; 0 where the script starts its ranks itself.
    arguments
        Its own options.
    twice
        Whether a second run goes on where the first stopped.
    """

    name: str
    ranks: int
    arguments: tuple[str, ...] = ()
    twice: bool = False


_FSDP = "examples/distributed/FSDP2/example.py"
_TP = "examples/distributed/tensor_parallelism"
_SERIES = "examples/distributed/ddp-tutorial-series"
EXAMPLES = (
    Example("examples/distributed/ddp/example.py", 2),
    Example(f"{_SERIES}/multigpu.py", 0, ("3", "1")),
    Example(f"{_SERIES}/multigpu_torchrun.py", 2, ("3", "1")),
    Example(f"{_SERIES}/multinode.py", 4, ("3", "1")),
    Example(
        "examples/distributed/minGPT-ddp/mingpt/main.py",
        2,
        (
            "data_config.path=data/input.txt",
            "data_config.truncate=0.01",
            "data_config.block_size=32",
            "gpt_config.n_layer=2",
            "gpt_config.n_head=2",
            "gpt_config.n_embd=32",
            "trainer_config.max_epochs=1",
            "trainer_config.data_loader_workers=0",
            "trainer_config.batch_size=64",
            "trainer_config.use_amp=false",
        ),
    ),
    Example(_FSDP, 2, twice=True),
    Example(_FSDP, 2, ("--explicit-prefetching", "--mixed-precision")),
    Example(_FSDP, 4, ("--dcp-api",), twice=True),
    Example(f"{_TP}/tensor_parallel_example.py", 4),
    Example(f"{_TP}/sequence_parallel_example.py", 4),
    Example(f"{_TP}/fsdp_tp_example.py", 4),
    Example("tutorials/intermediate_source/pipelining_tutorial.rst", 2),
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an example.

    Attributes
    ----------
    name, ranks, arguments
        Which one.
    said
        ``ok``, ``absent``, ``fails unwatched too`` or what is wrong.
    collectives
        Calls that the rings saw, over all ranks.
    steps
        Steps of optimizers that were compared, over all ranks.
    incidents
        Classes of incidents.
    """

    name: str
    ranks: int
    arguments: tuple[str, ...]
    said: str
    collectives: int = 0
    steps: int = 0
    incidents: tuple[str, ...] = ()


class _Run(msgspec.Struct):
    """What a run of a script said: exit code, output, digests of its steps, collectives seen."""

    code: int = 0
    output: str = ""
    errors: str = ""
    digests: dict[str, str] = {}
    collectives: int = 0
    incidents: tuple[str, ...] = ()


def run(example: Example, source: Path) -> Row:
    """Run `example` unwatched and watched, and compare."""
    row = Row(
        name=example.name, ranks=example.ranks or 4, arguments=example.arguments, said="absent"
    )
    if not (source / example.name).exists():
        return row
    with tempfile.TemporaryDirectory(prefix="ckptd-examples-") as scratch:
        plain = _run(example, source, Path(scratch) / "plain", watched=False)
        if plain.code:
            return msgspec.structs.replace(row, said=f"fails unwatched too: {_last(plain)}")
        watched = _run(example, source, Path(scratch) / "watched", watched=True)
    return msgspec.structs.replace(
        row,
        said=_compared(plain, watched),
        collectives=watched.collectives,
        steps=sum(text.count("\n") for text in watched.digests.values()),
        incidents=watched.incidents,
    )


def _run(example: Example, source: Path, scratch: Path, *, watched: bool) -> _Run:
    folder = scratch / "copy"
    script = source / example.name
    shutil.copytree(script.parent, folder, ignore=shutil.ignore_patterns("*.pt", "__pycache__"))
    name = script.name
    if script.suffix == ".rst":
        name = script.stem + ".py"
        (folder / name).write_text(code_of(script.read_text()))
    command = [sys.executable, name, *example.arguments]
    if example.ranks:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone"]
        command[4:4] = ["--nproc-per-node", str(example.ranks)]
    env = dict(os.environ)
    env |= environment(scratch / "standin", scratch / "digests", env)
    out = _Run()
    for _ in range(2 if example.twice else 1):
        one = _watched if watched else _started
        one(command, folder, env, out)
    for path in sorted((scratch / "digests").iterdir()):
        out.digests[path.name] = path.read_text()
    return out


def _started(command: list[str], folder: Path, env: dict[str, str], out: _Run) -> None:
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    out.code = out.code or done.returncode
    out.output += done.stdout
    out.errors += done.stderr


def _watched(command: list[str], folder: Path, env: dict[str, str], out: _Run) -> None:
    """Run it with a daemon that is still there afterwards, to be asked what was seen."""
    secret = secrets.token_hex(24)
    env = env | {"CKPTD_SECRET": secret, "CKPTD_RUN_DIR": str(folder.parent / "run")}
    (folder.parent / "run").mkdir(mode=0o700, exist_ok=True)
    job = ["--job", "example"]
    with subprocess.Popen(
        [sys.executable, "-c", _CLI, "serve", *job, "--json"],
        env=env,
        stdout=subprocess.PIPE,
    ) as daemon:
        try:
            told = _first_document(daemon)
            _started(
                [
                    sys.executable,
                    "-c",
                    _CLI,
                    "watch",
                    *job,
                    "--daemon",
                    told["url"],
                    "--",
                    *command,
                ],
                folder,
                env,
                out,
            )
            token = access_token(secret.encode())
            out.collectives += _collectives(_get(told["url"] + "/metrics", token).decode())
            said = msgspec.json.decode(_get(told["url"] + "/api/v1/incidents", token))
            out.incidents += tuple(incident["kind"] for incident in said["incidents"])
        finally:
            daemon.terminate()


def _first_document(daemon: subprocess.Popen[bytes]) -> dict[str, Any]:
    lines: list[bytes] = []
    for line in daemon.stdout or ():
        lines.append(line)
        if line.startswith(b"}"):
            break
    told: dict[str, Any] = msgspec.json.decode(b"".join(lines))
    return told


def _get(url: str, token: str) -> bytes:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def _collectives(metrics: str) -> int:
    found = re.findall(r"^ckptd_collectives_total(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    return round(sum(map(float, found)))


def code_of(text: str) -> str:
    """Return the Python code of a page, as it is, less the indent of its blocks."""
    return "\n".join(textwrap.dedent(block) for block in _CODE.findall(text))


def _compared(plain: _Run, watched: _Run) -> str:
    """Return ``ok``, or what a watched run did otherwise."""
    wrong = []
    if watched.code != plain.code:
        wrong.append(f"exit code {watched.code}: {_last(watched)}")
    if watched.digests != plain.digests:
        wrong.append("steps differ")
    if _letters(plain.output) != _letters(watched.output):
        wrong.append("output differs")
    if watched.incidents:
        wrong.append("incidents")
    if not watched.collectives:
        wrong.append("no collective was seen")
    return ", ".join(wrong) or "ok"


def _letters(output: str) -> Counter[str]:
    # Ranks share one output: which of them comes first, even within a line, is left to the system.
    return Counter(_CHANGING.sub("", output).replace("\n", "").replace(" ", ""))


def _last(done: _Run) -> str:
    errors = re.findall(r"^.*\w*Error: .*$", done.errors, re.MULTILINE)
    return errors[0].strip()[:200] if errors else done.errors[-200:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    print("script|ranks|collectives|steps compared|incidents|output and steps")
    print("---|---|---|---|---|---")
    for example in EXAMPLES:
        if given.only in example.name:
            row = run(example, given.folder)
            rows.append(row)
            options = " ".join(a for a in row.arguments if a.startswith("--"))
            script = " ".join(filter(None, (row.name, options)))
            cells = (script, row.ranks, row.collectives, row.steps, len(row.incidents), row.said)
            print("|".join(map(str, cells)), flush=True)
    if given.out:
        given.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return 0 if all(row.said.startswith(("ok", "absent", "fails")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
