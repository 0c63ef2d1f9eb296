"""The command as a whole: help, imports, exit codes, errors, signals, pipes, colors."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptd import __version__
from ckptd.cli.main import VERBS as OWN
from ckptd.cli.main import app, installed_verbs
from ckptd.elastic.cli.run import separated
from ckptd.errors import CorruptError
from ckptd.store import register_store
from tests.cli.recorded import write_events
from tests.cli.running import COMMAND, Cli, process
from tests.keys import key_pair
from tests.processes import PATIENCE_S

HEAVY = ("torch", "s3fs", "matplotlib", "fsspec", "aiohttp", "hypothesis")


VERBS = [*OWN, *installed_verbs()]

INNER = {
    "agent": ("run", "status", "stop"),
    "ctl": ("status", "restart", "exclude", "drain", "add", "pause", "resume", "stop"),
    "lay": ("check", "fmt", "show"),
    "recorder": ("build",),
}
"""Verbs that are a family of verbs."""


def modules_after(*commands: Sequence[str]) -> set[str]:
    """Modules that a process has imported when it ran some commands."""
    code = (
        "import json, sys; from ckptd.cli.main import run; failed = [c for c in"
        " json.loads(sys.argv[1]) if run(c)]; print('MODULES', *sys.modules, file=sys.stderr);"
        "sys.exit(str(failed) if failed else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done
    return set(done.stderr.partition("MODULES ")[2].split())


def named(out: str) -> set[str]:
    return {v for v in VERBS if re.search(rf"^. {v} ", out, re.MULTILINE)}


def test_help_names_the_verbs_that_most_need_and_help_all_every_one(cli: Cli) -> None:
    first = named(cli.good("--help").out)
    assert {"ls", "verify", "gc", "run", "watch", "demo"} < first
    assert not {"lay", "replay", "controller", "kubernetes"} & first
    assert named(cli.good("--help-all").out) == set(VERBS)
    assert named(cli.good("--help").out) == first


def test_help_of_run_leaves_out_what_has_no_effect(cli: Cli) -> None:
    first, all_of_it = (cli.good("run", f"--{word}").out for word in ("help", "help-all"))
    for option in ("--nnodes", "--nproc-per-node", "--job"):
        assert option in first
    for option in ("--rdzv-backend", "--start-method", "--set", "--tee"):
        assert option not in first
        assert option in all_of_it
    assert "ignored" not in all_of_it


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_has_an_example_that_parses(cli: Cli, verb: str) -> None:
    found = re.search(r"(?m)^Example: (?:exec )?ckptd (.*)$", cli.good(verb, "--help").out)
    assert found
    words = shlex.split(found[1])
    assert words[0] == verb
    if verb in ("run", "slurm"):
        words = ["run", *separated(words[1:], {})]
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_version(cli: Cli) -> None:
    assert cli.good("--version").out.strip() == __version__


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(cli: Cli, verb: str) -> None:
    out = cli.good(verb, "--help").out
    assert out.startswith(f"Usage: ckptd {verb}")
    for inner in INNER.get(verb, ()):
        assert f" {inner} " in cli.good(verb, "--help").out
        out = cli.good(verb, inner, "--help").out
        assert out.startswith(f"Usage: ckptd {verb} {inner}")
    assert "--json" in out


@pytest.mark.forks
def test_help_imports_neither_numpy_nor_verbs() -> None:
    found = modules_after(["--help"], ["--version"])
    assert not found & {*HEAVY, "numpy", "msgspec", "zstandard"}
    assert not {
        m
        for m in found
        if m.startswith(("ckptd.checkpoint.cli.ls", "ckptd.checkpoint.save", "ckptd.store"))
    }


@pytest.mark.forks
def test_help_of_verbs_imports_nothing_heavy() -> None:
    assert not modules_after(*([verb, "--help"] for verb in VERBS)) & set(HEAVY)


@pytest.mark.forks
def test_verbs_on_a_local_root_import_nothing_heavy(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTD_RUN_DIR", str(tmp_path / "run"))
    commands = [[verb, root] for verb in ("ls", "inspect", "verify", "gc", "pin", "doctor")]
    commands += [["ls", root, "--json"], ["cp", root, str(tmp_path / "x")]]
    commands += [["export", root, str(tmp_path / "y")], ["diff", root, root]]
    commands += [["rollback", f"{root}@10"], ["pin", f"{root}@20", "--remove"]]
    commands += [["annotate", f"{root}@10", "loss=1"], ["tag", root, "prod"]]
    commands += [["sign", root, "--key", key_pair(tmp_path, "release")[0]]]
    commands += [
        ["reshard", root, str(tmp_path / "z"), "--to", "ddp"],
        ["lay", "check", "hf.llama"],
        ["agent", "status"],
        ["trace", write_events(tmp_path / "events")],
    ]
    jobs = {"demo", "incidents", "open", "recorder", "replay", "serve", "top", "watch"}
    jobs |= {"controller", "ctl", "run", "slurm", "kubernetes"}
    assert {c[0] for c in commands} == set(VERBS) - jobs
    assert not modules_after(*commands) & {*HEAVY, "rich"}


def test_every_verb_is_a_function_of_its_module() -> None:
    for verb in VERBS:
        for command in [app[verb][i] for i in INNER.get(verb, ())] or [app[verb]]:
            assert command.default_command is not None, verb


# -- errors ----------------------------------------------------------------------------------------


def test_usage(cli: Cli) -> None:
    result = cli("ls")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "hint:   ckptd ls --help" in result.err


def test_a_step_given_apart_is_explained(cli: Cli, root: str) -> None:
    result = cli("rollback", root, "10")
    assert result.code == 2
    assert "steps are written ROOT@STEP" in result.err
    assert "ROOT@STEP" not in cli("ls", root, "more").err


@pytest.mark.parametrize("args", [("lss",), ("ls", "x", "--wrong"), ("gc", "x", "--keep", "many")])
def test_usage_errors_as_json(cli: Cli, args: tuple[str, ...]) -> None:
    result = cli(*args, "--json")
    assert (result.code, result.out) == (2, "")
    assert result.error["class"] == "UsageError"
    assert args[-1] in result.error["message"]


def test_an_error_is_a_block(cli: Cli, tmp_path: Path) -> None:
    result = cli("ls", str(tmp_path))
    assert (result.code, result.out) == (4, "")
    assert result.err.splitlines() == [
        "error: nothing is stored here",
        f"  where:  {tmp_path}",
        "  wanted: ckptd.json, or a checkpoint of dcp, hf, deepspeed, megatron, torch",
        "  hint:   check the path; the first save creates the root",
    ]


def test_an_error_as_json(cli: Cli, tmp_path: Path) -> None:
    result = cli("ls", str(tmp_path), "--json")
    assert (result.code, result.out) == (4, "")
    assert result.error["kind"] == "no-root"


def test_a_corrupt_record_is_exit_code_3(cli: Cli, root: str) -> None:
    Path(root, "ckptd.json").write_text("{")
    assert cli("ls", root).code == CorruptError.exit_code == 3


def test_the_traceback_on_demand(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in cli("ls", str(tmp_path)).err
    monkeypatch.setenv("CKPTD_DEBUG", "1")
    assert "Traceback" in cli("ls", str(tmp_path)).err


def test_a_defect_is_a_message(cli: Cli) -> None:
    def broken(url: str, options: object) -> None:
        raise ZeroDivisionError(url)

    register_store("brokenstore", broken, replace=True)  # type: ignore[arg-type]
    result = cli("ls", "brokenstore://x", "--json")
    assert result.code == 1
    assert "please report this bug of ckptd" in result.error["message"]
    assert "ZeroDivisionError" in result.error["found"]
    assert "Traceback" not in cli("ls", "brokenstore://x").err


def test_a_step_where_a_root_is_wanted_is_explained(cli: Cli, root: str) -> None:
    result = cli("ls", f"{root}@10")
    assert result.code == 4
    assert "ROOT@STEP" in result.err


# -- signals, pipes, terminals ---------------------------------------------------------------------


def wait_for_prompt(terminal: int) -> str:
    """Read what a terminal shows until a question stands there."""
    seen = b""
    end = time.monotonic() + PATIENCE_S
    while not seen.endswith(b"[y/N] "):
        assert time.monotonic() < end, seen
        seen += os.read(terminal, 4096)
    return seen.decode()


def on_terminal(*args: str, **env: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal of its own."""
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [*COMMAND, *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **env},
        start_new_session=True,
    )
    os.close(theirs)
    return running, ours


def rest_of(running: subprocess.Popen[bytes], terminal: int) -> str:
    """Read a terminal until its command has ended."""
    seen = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the last process that had the terminal open is gone
            part = b""
        if not part:
            break
        seen += part
    os.close(terminal)
    running.wait(PATIENCE_S)
    return seen.decode()


def test_interrupted(root: str) -> None:
    running, terminal = on_terminal("gc", root, "--keep", "1")
    wait_for_prompt(terminal)
    running.send_signal(signal.SIGINT)
    out = rest_of(running, terminal)
    assert running.returncode == 130
    assert "Traceback" not in out
    assert len(list(Path(root, "commits").iterdir())) == 2


@pytest.mark.parametrize(("answer", "code", "left"), [(b"y\n", 0, 1), (b"\n", 5, 2)])
def test_gc_asks_on_a_terminal(root: str, answer: bytes, code: int, left: int) -> None:
    running, terminal = on_terminal("gc", root, "--keep", "1")
    assert "step 10" not in wait_for_prompt(terminal)
    os.write(terminal, answer)
    rest_of(running, terminal)
    assert running.returncode == code
    assert len(list(Path(root, "commits").iterdir())) == left


def test_nobody_reads(root: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [*COMMAND, "inspect", root, "--json"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=PATIENCE_S,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def test_colors_on_a_terminal_only(root: str) -> None:
    assert "\x1b[" in rest_of(*on_terminal("ls", root))
    assert "\x1b[" not in rest_of(*on_terminal("ls", root, NO_COLOR="1"))
    assert "\x1b[" not in process("ls", root).out


def test_progress_on_a_terminal_only(root: str, tmp_path: Path) -> None:
    assert "copying" in rest_of(*on_terminal("cp", root, str(tmp_path / "a")))
    assert process("cp", root, str(tmp_path / "b")).err == ""


def test_completion(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "completion.sh"
    args = ("--shell", "bash", "--output", str(script), "--no-startup")
    assert str(script) in cli.good("--install-completion", *args).out
    assert all(verb in script.read_text() for verb in VERBS)


def test_completion_asks_before_it_changes_a_file_of_the_shell(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    start = tmp_path / ".bashrc"
    start.write_text("# mine\n")
    args = ("--install-completion", "--shell", "bash", "--output", str(tmp_path / "c.sh"))
    ended = cli(*args)
    assert ended.code == 5
    assert "--yes" in ended.err
    assert start.read_text() == "# mine\n"
    assert not (tmp_path / "c.sh").exists()
    cli.good(*args, "--yes")
    assert start.read_text() != "# mine\n"


def test_the_package_runs_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "ckptd", "--version"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, __version__)
