"""What programs say by ending, under a real launcher: codes, signals, exceptions, and by whom."""

from __future__ import annotations

import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.elastic.launchers.test_node import Launched, clean
from tests.processes import PATIENCE_S, free_port, until

pytestmark = [pytest.mark.dist, pytest.mark.forks("small", "all")]

TRAIN = """\
import os, signal, sys, threading, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, generation = dist.get_rank(), int(os.environ["CKPTD_GENERATION"])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("begin", flush=True)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def launch(folder: Path, body: str, *flags: str, name: str = "n") -> Launched:
    script = folder / "program.py"
    script.write_text(textwrap.dedent(body))
    return Launched(folder, name, *flags, argv=(str(script),))


def finished(launched: Launched) -> tuple[int, str]:
    code = launched.process.wait(PATIENCE_S)
    clean(launched)
    return code, launched.text()


def starts(text: str) -> int:
    return len(re.findall(r"^ckptd: generation \d+: ", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("import sys\nsys.exit(7)", 7),
        pytest.param("import sys\nsys.exit('no such data set')", 1, marks=pytest.mark.long),
        pytest.param("import os\nos._exit(9)", 9, marks=pytest.mark.long),
        pytest.param(
            "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])",
            2,
            marks=pytest.mark.long,
        ),
        pytest.param("raise ValueError('before there is a group')", 1, marks=pytest.mark.long),
        pytest.param("raise KeyboardInterrupt", 130, marks=pytest.mark.long),
        pytest.param(
            "import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 3)",
            3,
            marks=pytest.mark.long,
        ),
        pytest.param("import os, sys\nsys.exit(255)", 255, marks=pytest.mark.long),
    ],
)
def test_a_code_that_comes_again_before_the_first_step_is_the_jobs(
    tmp_path: Path, body: str, code: int
) -> None:
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "2"))
    assert (found, starts(text)) == (code, 2), text
    assert "at the same place, before its first step: the job is not restarted" in text


def test_an_error_that_all_ranks_have_is_shown_once(tmp_path: Path) -> None:
    found, text = finished(launch(tmp_path, "import nosuchmodule", "--nproc-per-node", "4"))
    assert found == 1
    assert text.count("Traceback (most recent call last)") == 1, text
    assert re.search(r"exit code 1: ModuleNotFoundError: .*\(program.py:1\)", text), text


@pytest.mark.long
def test_errors_that_differ_are_all_shown(tmp_path: Path) -> None:
    body = """\
        import os, time
        time.sleep(0.2 * int(os.environ["RANK"]) / 10)
        raise ValueError("rank " + os.environ["RANK"])
    """
    _, text = finished(launch(tmp_path, body, "--nproc-per-node", "2", "--no-restart-on", "1"))
    assert starts(text) == 1, text
    shown = set(re.findall(r"^ValueError: rank (\d)", text, re.MULTILINE))
    assert shown, text


@pytest.mark.long
def test_a_named_code_ends_the_job_at_once_also_after_steps(tmp_path: Path) -> None:
    body = TRAIN + "sys.exit(70) if rank == 1 else time.sleep(60)\n"
    flags = ("--nproc-per-node", "2", "--no-restart-on", "3,64-78")
    found, text = finished(launch(tmp_path, body, *flags))
    assert (found, starts(text)) == (70, 1), text


@pytest.mark.long
def test_a_code_after_steps_is_restarted(tmp_path: Path) -> None:
    body = TRAIN + "sys.exit(7) if rank == 1 and generation < 4 else None\ndist.barrier()\n"
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "2"))
    assert (found, starts(text)) == (0, 3), text


@pytest.mark.long
def test_none_turns_the_rule_off(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "1", "--no-restart-on", "none", "--set", "cycles=3")
    found, text = finished(launch(tmp_path, "import sys\nsys.exit(7)", *flags))
    assert found == 77, text
    assert starts(text) > 2, text


@pytest.mark.long
def test_an_exit_in_a_thread_ends_nothing(tmp_path: Path) -> None:
    body = TRAIN + "t = threading.Thread(target=sys.exit, args=(7,))\nt.start()\nt.join()\n"
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "2"))
    assert (found, starts(text)) == (0, 1), text


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        pytest.param("sys.exit(5)", 5, marks=pytest.mark.long),
        pytest.param("time.sleep(1); os.abort()", 134, marks=pytest.mark.long),
    ],
)
def test_who_fails_while_the_others_end_well_restarts_nothing(
    tmp_path: Path, end: str, code: int
) -> None:
    body = TRAIN + f"if rank == 1:\n    {end}\n"
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "3"))
    assert (found, starts(text)) == (code, 1), text
    assert "all other ranks finished successfully" in text


@pytest.mark.long
def test_the_last_words_of_others_are_waited_for(tmp_path: Path) -> None:
    body = TRAIN + (
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 0:\n    time.sleep(3)\n    print('evaluated', flush=True)\n"
    )
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "3"))
    assert (found, starts(text)) == (137, 1), text
    assert "evaluated" in text


@pytest.mark.long
def test_who_is_killed_while_others_need_it_is_restarted(tmp_path: Path) -> None:
    body = TRAIN + (
        "if rank == 1 and generation == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
    )
    found, text = finished(launch(tmp_path, body, "--nproc-per-node", "3"))
    assert (found, starts(text)) == (0, 2), text
    assert "SIGKILL: " in text
    assert "of the machine's" in text


@pytest.mark.long
def test_nodes_that_end_alike_end_the_job(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--job", f"ends-{port}")
    both = [launch(tmp_path, "import sys\nsys.exit(7)", *flags, name=name) for name in "ab"]
    found = [finished(one) for one in both]
    assert [code for code, _ in found] == [7, 7], found
    assert max(starts(text) for _, text in found) <= 3, found


@pytest.mark.long
def test_one_rank_a_node_that_is_killed_at_the_end_restarts_nothing(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--job", f"late-{port}")
    body = TRAIN + "if rank == 1:\n    time.sleep(2)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    both = [launch(tmp_path, body, *flags, name=name) for name in "ab"]
    found = [finished(one) for one in both]
    assert [code for code, _ in found] == [137, 137], found
    assert [starts(text) for _, text in found] == [1, 1], found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_reaches_the_script_as_it_is(tmp_path: Path, number: signal.Signals) -> None:
    body = TRAIN + (
        "def handler(number, _):\n"
        "    os.write(1, f'got {signal.Signals(number).name}\\n'.encode())\n"
        "    time.sleep(1)\n"
        "    os.write(1, b'cleaned up\\n')\n"
        "    sys.exit(0)\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, handler)\n"
        "print('ready', flush=True)\n"
        "while True:\n    time.sleep(0.1)\n"
    )
    launched = launch(tmp_path, body, "--nproc-per-node", "2", "--grace", "60")
    until(lambda: launched.text().count("ready") == 2, launched.text)
    launched.process.send_signal(number)
    found, text = finished(launched)
    assert found == 128 + number
    assert text.count(f"got {number.name}") == text.count("cleaned up") == 2, text


@pytest.mark.long
def test_the_grace_after_sigterm_is_a_flag(tmp_path: Path) -> None:
    body = "import signal, time\nsignal.signal(15, lambda *_: print('no', flush=True))\n"
    body += "print('ready', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
    launched = launch(tmp_path, body, "--grace", "1")
    until(lambda: "ready" in launched.text(), launched.text)
    launched.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    found, text = finished(launched)
    assert found == 143
    assert "no\n" in text
    assert time.monotonic() - began < 25  # not the 30 s of the default


@pytest.mark.forks
def test_without_pytorch_the_error_is_plain(tmp_path: Path) -> None:
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('libtorch is not there')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package.parent))
        launched = launch(tmp_path, "print('never')", "--nproc-per-node", "2")
    found, text = finished(launched)
    assert found == 2, text
    assert "PyTorch cannot be imported: ImportError: libtorch is not there" in text
