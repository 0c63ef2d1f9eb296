"""Plants faults in programs of the corpus: ``python -m tests.monitor.corpus.planted [--jobs ...]``.

Twelve kinds of jobs, five faults in each, of a rank that a seed draws, at the beginning of a round.
All run one after the other under one ``ckptd watch`` with a floor of some seconds. What is said
must name that rank and no other, with what an operator needs: its process and node, what is wrong,
where in the code, since when, what it costs, and what to do (`golden`). Prints a row a case; the
exit code is 1 if one was not right.

``--guide CLEAN PLANTED ...`` writes the counts of what ``--out`` kept into the guide: of
`tests.monitor.corpus.run`, and of this module, where a later file counts for the cases it has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ckptd.errors import CkptdError
from ckptd.monitor.cli.incidents import incidents
from ckptd.monitor.daemon.client import connect
from tests.monitor.corpus.base import NEXT, PLANTED, PLANTED_VARIABLE, Plan
from tests.monitor.corpus.run import Outcome
from tests.processes import until

__all__ = ["FAULTS", "JOBS", "Told", "golden", "main", "run", "write_guide"]

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guide" / "diagnosis.md"
JOBS = {
    "DDP": "early_stop_by_broadcast",
    "FSDP2": "fsdp2",
    "tensor parallel": "tensor_parallel",
    "pipeline 1F1B": "pipeline_1f1b",
    "experts": "experts_with_uneven_tokens",
    "FSDP2 over tensor parallel": "fsdp_over_tensor_parallel",
    "generators beside trainers": "trainers_beside_generators",
    "inference": "inference_tensor_parallel",
    "evaluation": "evaluation_of_shards",
    "RL of four roles": "rl_of_four_roles",
    "plain loop": "bare_loop",
    "no torch optimizer": "an_optimizer_of_its_own",
}
_HANG, _CRASH = ("non-communication hang",), ("crash",)
FAULTS = {
    "stop": _HANG,
    "sleep": _HANG,
    "kill": _CRASH,
    "raise": _CRASH,
    "extra": ("mismatch", "desync", "deadlock"),
}
"""What is done, and the classes that are right of it. ``extra`` is a call that no other makes."""
_START_S, _SAID_S, _SETTLE_S = 90.0, 90.0, 1.5


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of one case.

    Attributes
    ----------
    job, fault, victim
        What was done to whom.
    kind, ranks
        Class of the first incident, and the ranks that it names; empty of nothing.
    early, more
        Incidents before the fault, and beside the first: both are false.
    lacks
        What its text lacks; see `golden`.
    clean_s, after_s
        From the start to the fault, and from there to the incident.
    load
        Load average of the machine.
    text
        As ``ckptd incidents ID`` shows it.
    """

    job: str
    fault: str
    victim: int
    kind: str = ""
    ranks: tuple[int, ...] = ()
    early: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    clean_s: float = 0.0
    after_s: float = 0.0
    load: float = 0.0
    text: str = ""

    @property
    def named(self) -> bool:
        """Whether the class is right, and the victim alone is named."""
        return self.kind in FAULTS[self.fault] and self.ranks == (self.victim,)

    @property
    def right(self) -> bool:
        return self.named and not (self.early or self.more or self.lacks)


def golden(text: str, victim: int, pid: int, node: str) -> list[str]:
    """Return what the text of an incident does not tell an operator."""
    wanted = {
        "who": rf"^suspect: rank {victim}, process {pid} on {re.escape(node)}\b\S*,",
        "what": r"^[\w.-]+: (crash|mismatch|desync|deadlock|non-communication hang), open",
        "where": r"\w+\.py:\d+",
        "since when": r"opened \S+.*, \d+\.\d\d s after its first\s+sign",
        "what it costs": r"^cost: \S+",
        "what next": r"^action: \S+",
    }
    return [what for what, line in wanted.items() if not re.search(line, text, re.MULTILINE)]


class _Watched:
    """Cases one after the other under one watch."""

    def __init__(self, cases: Sequence[tuple[str, str, int]], folder: Path, floor: float) -> None:
        self.folder, self.job = folder, f"planted-{secrets.token_hex(3)}"
        os.environ["CKPTD_RUN_DIR"] = str(folder / "run")
        (folder / "run").mkdir(mode=0o700)
        plans = [Plan(JOBS[job], fault, victim) for job, fault, victim in cases]
        env = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        env |= {PLANTED_VARIABLE: str(folder), "CORPUS_SECONDS": "600"}
        command = [sys.executable, "-c", "from ckptd.cli.main import main; main()", "watch"]
        command += ["--job", self.job, "--floor", f"train={floor}", "--"]
        command += [sys.executable, "-m", "tests.monitor.corpus.main", *map(str, plans)]
        self.log = folder / "watch.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log
            )

    def said(self, generation: int) -> list[dict[str, Any]]:
        """Return the incidents of one case, the oldest first."""
        try:
            found = connect(None, self.job).get("/incidents", limit=200)["incidents"]
        except CkptdError:  # it is not there yet
            return []
        mine = [i for i in found if i["generation"] == generation and i["kind"] != "cannot say"]
        return sorted(mine, key=lambda i: i["opened_at"])

    def play(self, number: int, job: str, fault: str, victim: int) -> Told:
        """Wait for the fault of one case and for what is said of it, and end the case."""
        place = self.folder / f"{number}.{PLANTED}"
        begun = time.time()
        until(place.exists, f"{job}: {fault}", _START_S)
        at, pid = (float(word) for word in place.read_text().split())
        end = time.monotonic() + _SAID_S
        while time.monotonic() < end and not [i for i in self.said(number) if i["opened_at"] > at]:
            time.sleep(0.3)
        time.sleep(_SETTLE_S)
        said = self.said(number)
        later = [i for i in said if i["opened_at"] > at]
        text = self.text(later[0]["id"]) if later else ""
        (self.folder / f"{number}.{NEXT}").touch()
        return Told(
            job=job,
            fault=fault,
            victim=victim,
            kind=later[0]["kind"] if later else "",
            ranks=_ranks(later[0]) if later else (),
            early=tuple(i["headline"] for i in said if i not in later),
            more=tuple(i["headline"] for i in later[1:]),
            lacks=tuple(golden(text, victim, int(pid), os.uname().nodename)) if later else (),
            clean_s=at - begun,
            after_s=later[0]["opened_at"] - at if later else 0.0,
            load=os.getloadavg()[0],
            text=text,
        )

    def text(self, ident: str) -> str:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            reply = incidents(ident, job=self.job)
            assert not isinstance(reply, int)
            reply.print(as_json=False)
        return shown.getvalue()

    def close(self) -> None:
        """Let it end as its last program has, or end it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()


def _ranks(incident: dict[str, Any]) -> tuple[int, ...]:
    suspects = incident["verdict"]["suspects"]
    return tuple(int(s["name"]) for s in suspects if s["target"] == "rank")


def run(cases: Sequence[tuple[str, str, int]], floor: float) -> list[Told]:
    """Play cases of job, fault and victim; print a row each."""
    told: list[Told] = []
    with tempfile.TemporaryDirectory(prefix="ckptd-planted-", ignore_cleanup_errors=True) as name:
        watched = _Watched(cases, Path(name), floor)
        try:
            for number, (job, fault, victim) in enumerate(cases, 1):
                told.append(watched.play(number, job, fault, victim))
                print(row(told[-1]), flush=True)
        except TimeoutError as error:
            print(f"{error}\n{watched.log.read_text(errors='replace')[-3000:]}", flush=True)
        finally:
            watched.close()
    return told


def row(told: Told) -> str:
    """Return a case as one line, or with its text if it was not right."""
    words = (
        "ok " if told.right else "BAD",
        f"{told.job}: {told.fault} of rank {told.victim}, load {told.load:.1f}:",
        f"{told.kind or 'nothing'} of {told.ranks}, {told.after_s:.1f} s",
        f"before it: {told.early}" if told.early else "",
        f"beside it: {told.more}" if told.more else "",
        f"lacks {told.lacks}" if told.lacks else "",
        "" if told.right else "\n" + told.text.partition("\nstacks of")[0],
    )
    return " ".join(filter(None, words))


def write_guide(clean: Path, planted: Sequence[Path]) -> None:
    """Put the counts between their marks in the guide."""
    programs = msgspec.json.decode(clean.read_bytes(), type=list[Outcome])
    files = [msgspec.json.decode(path.read_bytes(), type=list[Told]) for path in planted]
    every = [told for file in files for told in file]
    newest = {(told.job, told.fault): told for told in every}
    loads = sorted([told.load for told in every] + [program.load for program in programs])
    hours = sum(p.seconds for p in programs) / 3600 + sum(t.clean_s for t in every) / 3600
    false = sum(len(t.early) + len(t.more) for t in every) + sum(len(p.incidents) for p in programs)
    fine, named = sum(p.fine for p in programs), sum(t.named for t in newest.values())
    said = [told for told in newest.values() if told.kind]
    whole = sum(not told.lacks for told in said)
    sentence = (
        f"**{fine} of {len(programs)} right programs had no incident. {named} of {len(newest)} "
        f"planted faults have the right class and the right culprit alone; {whole} of {len(said)} "
        f"texts say all of it. {false} false alarms in {hours:.1f} h without a fault**, load "
        f"{loads[0]:.0f} to {loads[-1]:.0f} on two cores. Seconds are from the fault, with a "
        f"floor of 3 s:"
    )
    lines = [
        sentence,
        "",
        "| job | " + " | ".join(FAULTS) + " |",
        "|---|" + "---|" * len(FAULTS),
    ]
    for job in JOBS:
        cells = [_cell(newest.get((job, fault))) for fault in FAULTS]
        lines.append(f"| {job} | {' | '.join(cells)} |")
    head, _, rest = GUIDE.read_text().partition("<!-- planted -->")
    rest = rest.partition("<!-- /planted -->")[2]
    body = "\n".join(lines)
    GUIDE.write_text(f"{head}<!-- planted -->\n\n{body}\n\n<!-- /planted -->{rest}")


def _cell(told: Told | None) -> str:
    if told is None:
        return "–"
    if told.named:
        return f"{told.after_s:.1f}"
    return f"{told.kind} of {len(told.ranks)}" if told.kind else "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--floor", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--guide", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    if given.guide:
        write_guide(given.guide[0], given.guide[1:])
        return 0
    rng = random.Random(given.seed)
    cases = [(job, fault, rng.randrange(4)) for job in given.jobs for fault in given.faults]
    told = run(cases, given.floor)
    if given.out is not None:
        given.out.write_bytes(msgspec.json.encode(told))
    named = sum(t.named for t in told)
    false = sum(len(t.early) + len(t.more) for t in told)
    whole = sum(not t.lacks for t in told if t.kind)
    print(
        f"{len(cases)} faults planted, {named} named rightly, {whole} texts whole, {false} false"
        f" alarms; {sum(t.clean_s for t in told) / 60:.1f} min without a fault"
    )
    return 0 if len(told) == len(cases) and all(t.right for t in told) else 1


if __name__ == "__main__":
    sys.exit(main())
