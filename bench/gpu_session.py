"""Checks of ckptd on a GPU, in three calls of ten minutes.

    python -m bench.gpu_session --list
    python -m bench.gpu_session --wheels wheels                  # where there is a network
    python -m bench.gpu_session --call 1 --with wheels --out out # on the machine; then 2 and 3
    python -m bench.gpu_session --report out                     # all calls' files in one folder
    python -m bench.gpu_session --call 1 --simulated --out out   # no device: tiny, and no rates

The machine needs Python, PyTorch and numpy; what else ckptd imports is carried along as wheels.
Each check is a process with a limit of its own, the most valuable first. What it finds is a line of
``gpu-callN.jsonl`` as soon as it is known, and on the disk: a machine that is taken away leaves
what was done. A check that hangs writes its stacks to ``gpu-callN.log`` and is ended with all that
it has started. ``--resume`` leaves out what the folder has already; ``docs/guide/devices.md`` says
how to send the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CHECKS_SCRIPT = HERE / "gpu_checks.py"
CALL_S = 585.0
"""Of a call: machines that many share may end a command after 600 seconds."""
LEAST_SHARE = 0.4
"""A check begins if so much of its limit is left of the call."""
KILLED_S = 5.0
TAIL = 3000
SCRATCH_BYTES = 30e9


class Check(NamedTuple):
    """A check, which runs in a process of its own.

    Attributes
    ----------
    call
        In which of the three it runs.
    limit_s
        Limit of the process, in seconds.
    what
        The question that it answers.
    needs
        Reason why it needs a real device; empty: it runs on a simulated one as well.
    """

    call: int
    limit_s: float
    what: str
    needs: str = ""


CHECKS: dict[str, Check] = {
    "probe": Check(1, 50, "versions, memory, what is imported, what ckptd says of the device"),
    "link": Check(1, 80, "GB/s: page-locked by torch, registered, pageable; page-locking"),
    "remap": Check(1, 30, "memory that is unmapped locked, and mapped again there"),
    "promises": Check(1, 150, "what lazy copies promise, check by check; the recorder's on NCCL"),
    "race": Check(1, 45, "5,000 saves of a small state, a step each: nothing raises"),
    "save": Check(1, 225, "a save at each step: share of the link, gate, step; all bytes right"),
    "small": Check(2, 90, "2,320 small tensors: ms in save and gate, beside one packed copy"),
    "restore": Check(2, 110, "from near memory and from files: GB/s, share of the link, memory"),
    "abort": Check(2, 30, "two groups behind a kernel that runs, as a session aborts them"),
    "abort-serial": Check(2, 25, "the same, one group after the other", "NCCL"),
    "abort-torch": Check(2, 25, "the same by torch's _abort_process_group", "NCCL"),
    "abort-watchdog": Check(2, 30, "as a session, PyTorch's watchdog left on", "NCCL"),
    "session": Check(2, 140, "a rank killed, five times: seconds, locked and free memory"),
    "recorder": Check(2, 100, "us of the host a call, by Python and natively"),
    "changes": Check(2, 35, "find what changed on the device, patch a slot; beside a copy of all"),
    "zygote": Check(3, 40, "is a process that has imported torch safe to fork; first kernel"),
    "graphs": Check(3, 45, "captures while a save is copied, in each mode; replays that ask"),
    "assert": Check(3, 40, "an assert in a kernel: what a save under way says"),
    "memory": Check(3, 40, "no memory for clones, and none to lock: right bytes all the same"),
    "kill": Check(3, 50, "SIGKILL in mid-copy: the last checkpoint loads, memory comes back"),
    "replicas": Check(3, 70, "two ranks of one device: cost of samples, waits in the first save"),
    "publish": Check(3, 70, "weights by IPC, out of a slot, over a socket: GB/s; all bytes right"),
    "dcp": Check(3, 110, "DCP's async_save with page-locked staging, as `save`", "DCP's stager"),
    "again": Check(3, 70, "what lazy copies promise, a second time"),
    "csan": Check(3, 50, "the same under TORCH_CUDA_SANITIZER", "CSAN's hooks in the driver"),
}
"""The most valuable first; limits of each call sum up to `CALL_S` at most."""


class Aim(NamedTuple):
    """A figure that is wanted."""

    what: str
    check: str
    figure: str
    least: bool
    bound: float


AIMS = (
    Aim("device to host, of a plain page-locked copy", "save", "share_of_link", True, 0.95),
    Aim(
        "a step with a save each to near memory, of one without",
        "save",
        "memory_ratio_each_step",
        False,
        1.01,
    ),
    Aim("restore from near memory, of the link", "restore", "memory_share_of_link", True, 0.8),
    Aim(
        "recovery in process, two groups of NCCL, s before the first step",
        "session",
        "recovery_s",
        False,
        1.0,
    ),
    Aim("recorder, native, us a call", "recorder", "native_us", False, 1.0),
)


# --- running ------------------------------------------------------------------------------------


class Record:
    """The lines of one call, each on the disk before the next thing begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **row: object) -> None:
        """Append a line."""
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, json.dumps(row).encode() + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)

    def rows(self) -> list[dict[str, Any]]:
        """Return all lines; one that was cut off is left out."""
        found = []
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return found


class Ending(NamedTuple):
    """How a check's process ended: its status, or why it was ended."""

    status: int | None
    hung: bool
    left: list[str]


class Session:
    """Runs checks one after the other.

    Parameters
    ----------
    out
        Folder for ``NAME.jsonl`` and ``NAME.log``.
    scratch
        Folder for what checks write; in memory where that has room.
    checks
        By name.
    script
        Is called with the name of a check, and calls it.
    environ
        For checks, besides this process's own.
    extra
        Further arguments of the script.
    seconds
        For all checks together.
    """

    def __init__(
        self,
        out: Path,
        scratch: Path,
        *,
        name: str = "gpu",
        checks: Mapping[str, Check] = CHECKS,
        script: Path = CHECKS_SCRIPT,
        environ: Mapping[str, str] | None = None,
        extra: Sequence[str] = (),
        seconds: float = CALL_S,
        simulated: bool = False,
    ) -> None:
        self.record = Record(out / f"{name}.jsonl")
        self._log = out / f"{name}.log"
        self._scratch = scratch
        self._checks = checks
        self._script = script
        self._environ = {**os.environ, **(environ or {})}
        self._extra = [*extra, *(["--simulated"] if simulated else [])]
        self._until = time.monotonic() + seconds
        self._simulated = simulated
        _adopt_orphans()

    def run(self, names: Sequence[str]) -> dict[str, str]:
        """Run checks; return how each ended."""
        return {name: self._one(name) for name in names}

    def _one(self, name: str) -> str:
        check = self._checks[name]
        left = self._until - time.monotonic()
        why = ""
        if self._simulated and check.needs:
            why = f"needs hardware: {check.needs}"
        elif left < LEAST_SHARE * check.limit_s:
            why = f"{max(0.0, left):.0f} s of the call are left, {check.limit_s:.0f} are its limit"
        if why:
            return self._end(name, "skipped", 0.0, why)
        limit = min(check.limit_s, left)
        self.record.write(check=name, event="begin", limit_s=round(limit, 1))
        print(f"{name}: {check.what}", file=sys.stderr, flush=True)
        before = len(self.record.rows())
        at = self._log.stat().st_size if self._log.exists() else 0
        began = time.monotonic()
        ending = self._process(name, limit)
        seconds = time.monotonic() - began
        rows = [row for row in self.record.rows()[before:] if row.get("check") == name]
        if ending.hung:
            result, why = "hung", f"ended after {limit:.0f} s"
        elif ending.status and ending.status < 0:
            result, why = "crashed", f"signal {signal.Signals(-ending.status).name}"
        elif ending.status:
            failed = next((row["failed"] for row in rows if "failed" in row), None)
            result, why = "failed", f"status {ending.status}" if failed is None else str(failed)
        else:
            result = "ok"
        if ending.left:
            why = "; ".join(filter(None, (why, "not ended by SIGKILL: " + ", ".join(ending.left))))
        tail = "" if result == "ok" else self._tail(at)
        return self._end(name, result, seconds, why, tail)

    def _end(self, name: str, result: str, seconds: float, why: str = "", tail: str = "") -> str:
        row = {"check": name, "event": "end", "result": result, "seconds": round(seconds, 2)}
        self.record.write(**row, why=why, tail=tail)
        print(f"{name}: {result} {why} ({seconds:.1f} s)", file=sys.stderr, flush=True)
        return result

    def _process(self, name: str, limit: float) -> Ending:
        folder = self._scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [sys.executable, str(self._script), name, "--out", str(self.record.path)]
        command += ["--dir", str(folder), "--limit", str(limit), *self._extra]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            log.write(f"\n== {name}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        hung = False
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            hung = True
        finally:  # also where this process is interrupted
            left = _end_descendants(child)
            shutil.rmtree(folder, ignore_errors=True)
        return Ending(child.returncode, hung, left)

    def _tail(self, at: int) -> str:
        with self._log.open("rb") as log:
            log.seek(max(at, self._log.stat().st_size - TAIL))
            return log.read().decode(errors="replace")


def _adopt_orphans() -> None:
    """Become the parent of what a check leaves running, so that it is found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            words = path.read_text().rpartition(")")[2].split()
            found[int(path.parent.name)] = (int(words[1]), words[0])
    return found


def _end_descendants(child: subprocess.Popen[bytes]) -> list[str]:
    """Kill, by id, what a check has started and itself; name what does not end.

    Whatever is below this process now is the check's: one runs at a time.
    """
    end = time.monotonic() + KILLED_S
    while True:
        known = _parents()
        mine, rest = {os.getpid()}, set(known)
        while new := {pid for pid in rest if known[pid][0] in mine}:
            mine |= new
            rest -= new
        mine.discard(os.getpid())
        if child.poll() is not None:
            mine.discard(child.pid)
        for pid in mine:
            if known[pid][1] == "Z" and pid != child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if not mine:
            return []
        if time.monotonic() > end:
            return [f"{pid} (state {known[pid][1]})" for pid in sorted(mine)]
        time.sleep(0.02)


@contextlib.contextmanager
def scratch_folder(given: str | None) -> Iterator[Path]:
    """Make a folder in memory where that has room, else where temporary files go."""
    if given is not None:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given)
        return
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > SCRATCH_BYTES
    folder = Path(tempfile.mkdtemp(prefix="ckptd-gpu-", dir=memory if room else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- wheels -------------------------------------------------------------------------------------

_ON_THE_MACHINE = frozenset({"numpy", "torch"})
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def carried(python: str = "3.12") -> list[str]:
    """Return the names of what ckptd needs but numpy and PyTorch, and what that needs in turn."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, found = list(project["dependencies"]), set()
    while wanted:
        asked = Requirement(wanted.pop())
        name = canonicalize_name(asked.name)
        applies = asked.marker is None or asked.marker.evaluate(
            {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
        )
        if applies and name not in _ON_THE_MACHINE and name not in found:
            found.add(name)
            wanted += importlib.metadata.requires(name) or []
    return sorted(found)


def pinned(names: Sequence[str]) -> str:
    """Return requirements of some names at the versions of constraints.txt, with their hashes."""
    pins = [sys.executable, str(ROOT / "scripts" / "pins"), "--hashed"]
    done = [subprocess.run([*pins, n], capture_output=True, text=True, check=True) for n in names]
    return "".join(one.stdout for one in done)


def download(folder: Path, python: str = "3.12") -> None:
    """Download wheels for the machine's Python."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "requirements.txt"
    asked.write_text(pinned(carried(python)))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(folder), "-r", str(asked)], check=True)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB, in {folder}")


def unpack(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels of what is not installed here; return their names.

    Raises
    ------
    SystemExit
        There are no wheels.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"no wheels are in {wheels}: `--wheels {wheels}` downloads them")
    taken = []
    for path in files:
        name = path.name.partition("-")[0]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            continue
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site)
        taken.append(name)
    return taken


# --- the report ---------------------------------------------------------------------------------


class Found(NamedTuple):
    """Results of some calls: figures and ends by check; the last run of each."""

    figures: dict[str, dict[str, Any]]
    ends: dict[str, dict[str, Any]]
    simulated: bool


def collect(folder: Path) -> Found:
    """Read the lines of all calls of a folder."""
    figures: dict[str, dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}
    simulated = False
    for path in sorted(folder.rglob("*.jsonl"), key=lambda p: p.stat().st_mtime):
        for row in Record(path).rows():
            name = row.get("check", "")
            simulated = simulated or bool(row.get("simulated"))
            if row.get("event") == "begin":
                figures[name] = {}
                ends[name] = {"result": "cut", "seconds": float("nan"), "why": "no end"}
            elif row.get("event") == "end":
                ends[name] = row
            elif "figures" in row:
                figures.setdefault(name, {}).update(row["figures"])
    return Found(figures, ends, simulated)


def verdicts(found: Found) -> list[list[str]]:
    """Return a row for each aim: what, wanted, found, reached."""
    rows = []
    for aim in AIMS:
        value = found.figures.get(aim.check, {}).get(aim.figure)
        wanted = f"{'at least' if aim.least else 'at most'} {aim.bound:g}"
        if value is None:
            end = found.ends.get(aim.check, {}).get("result", "not run")
            rows.append([aim.what, wanted, "–", f"not known: {aim.check} {end}"])
            continue
        reached = value >= aim.bound if aim.least else value <= aim.bound
        rows.append([aim.what, wanted, f"{value:.3g}", "yes" if reached else "no"])
    return rows


def section(found: Found) -> str:
    """Return the section for RESULTS.md."""
    sys.path.insert(0, str(HERE))
    import common

    probe = found.figures.get("probe", {})
    device = f"{probe.get('device', 'an unknown device')}, torch {probe.get('torch', '?')}"
    parts = [
        "## On a device",
        f"{device}, CUDA {probe.get('cuda', '?')}, {probe.get('date', '?')}.",
    ]
    if found.simulated:
        parts.append("SIMULATED: shows that the script runs; no figure is one of a device.")
    parts.append(common.table(["aim", "wanted", "found", "reached"], verdicts(found)))
    rows = []
    for name, check in CHECKS.items():
        end = found.ends.get(name, {"result": "not run", "seconds": float("nan"), "why": ""})
        figures = found.figures.get(name, {})
        shown = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
        ended = f"{end['result']} {_short(end['why'])}".strip()
        rows.append([name, check.what, ended, float(end["seconds"]), shown or "–"])
    parts.append(common.table(["check", "finds out", "ended", "s", "figures"], rows))
    return "\n\n".join(parts)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return str(value).replace("|", "/").replace("\n", " ")


# --- the command line ---------------------------------------------------------------------------


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the checks to run."""
    if options.checks:
        names = options.checks.split(",")
        if unknown := [name for name in names if name not in CHECKS]:
            raise SystemExit(f"no such checks: {', '.join(unknown)}; --list names them")
    else:
        names = [name for name, check in CHECKS.items() if check.call == options.call]
    if options.resume:
        ends = collect(Path(options.out)).ends
        names = [name for name in names if ends.get(name, {}).get("result") != "ok"]
    return names


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_session",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    act = parser.add_mutually_exclusive_group(required=True)
    act.add_argument("--call", type=int, choices=(1, 2, 3), help="run the checks of one call")
    act.add_argument("--checks", help="run these: NAME,NAME")
    act.add_argument("--list", action="store_true", help="print the checks")
    act.add_argument("--wheels", metavar="FOLDER", help="download what the machine may lack")
    act.add_argument("--report", metavar="FOLDER", help="print the figures beside the aims")
    parser.add_argument("--python", default="3.12", help="for --wheels: the machine's (3.12)")
    parser.add_argument("--publish", action="store_true", help="--report goes to RESULTS.md, too")
    parser.add_argument("--with", dest="carried", metavar="FOLDER", help="wheels to use")
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-session"), help="default $OUT")
    parser.add_argument("--resume", action="store_true", help="not what is ok in --out already")
    parser.add_argument("--simulated", action="store_true", help="tiny, on a simulated device")
    parser.add_argument("--gb", type=float, default=12.0, help="of the state (12)")
    parser.add_argument("--seconds", type=float, default=CALL_S, help="for all checks (585)")
    parser.add_argument("--dir", help="scratch folder (default: in memory where there is room)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.list:
        for name, check in CHECKS.items():
            needs = f" (never simulated: needs {check.needs})" if check.needs else ""
            print(f"{check.call} {name:15}{check.limit_s:5.0f} s  {check.what}{needs}")
        return 0
    if options.wheels:
        download(Path(options.wheels), options.python)
        return 0
    if options.report:
        return report(Path(options.report), options.publish)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    name = f"gpu-call{options.call}" if options.call else "gpu-checks"
    with scratch_folder(options.dir) as scratch:
        environ = {"PYTHONUNBUFFERED": "1"}
        # All ranks are here, and a machine without a network may not know its own name.
        environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if not options.simulated:  # what a simulated device is built of is there already
            environ["CKPTD_BUILDS"] = str(scratch / "builds")
        path = [str(ROOT), str(ROOT / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        if options.carried:
            site = scratch / "site"
            taken = unpack(Path(options.carried), site)
            print(f"unpacked: {', '.join(taken) or 'nothing, all is installed'}", file=sys.stderr)
            path.insert(0, str(site))
        environ["PYTHONPATH"] = os.pathsep.join(path)
        extra = ["--gb", str(options.gb)]
        session = Session(
            Path(options.out),
            scratch,
            name=name,
            environ=environ,
            extra=extra,
            seconds=options.seconds,
            simulated=options.simulated,
        )
        session.record.write(event="call", name=name, simulated=options.simulated, at=time.time())
        ends = session.run(chosen(options))
    print(section(collect(Path(options.out))))
    return 0 if set(ends.values()) <= {"ok", "skipped"} else 1


def report(folder: Path, publish: bool) -> int:
    found = collect(folder)
    if not found.ends:
        print(f"{folder} has no lines of any check", file=sys.stderr)
        return 2
    text = section(found)
    print(text)
    if publish:
        import common

        body = {"figures": found.figures, "ends": found.ends}
        common.publish("gpu_session", "python -m bench.gpu_session --report", text, body)
    return 0


if __name__ == "__main__":
    sys.exit(main())
