"""The simulated device itself: it shows what is wrong, and what is right stays right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.base.runtime import torchextension
from ckptd.errors import DeadlineError, UsageError
from tests.simdevice import install, run, run_simulated_ranks
from tests.simdevice.loading import GUARD
from tests.simulated import ON_SIMULATED_DEVICES, failing
from tests.testing import devices as programs

pytestmark = ON_SIMULATED_DEVICES

GUIDE = Path(__file__).parents[2] / "docs/guide/simulated-device.md"


def failed_of(name: str) -> dict[str, str]:
    return failing(programs.OF_EVERY_KIND | (programs.OF_CUDA if name == "cuda" else {}))


@pytest.mark.parametrize("name", ["cuda", "xpu", "newdevice"])
def test_devices_of_every_name(name: str) -> None:
    failed = run(failed_of, name, name=name)
    assert not failed, "\n".join(failed.values())


def test_ranks_reduce_what_is_on_their_devices() -> None:
    assert run_simulated_ranks(2, programs.reduced, schedule="lazy") == [[6.0] * 8] * 2


def find_a_problem() -> None:
    programs.installed().problems.append("no device would forgive this")


def never_return() -> None:
    programs.installed().hold()
    programs.module().synchronize()


def test_what_a_function_raises_or_finds_is_raised_here() -> None:
    with pytest.raises(AssertionError, match="forgive"):
        run(find_a_problem)
    with pytest.raises(UsageError, match="no such schedule"):
        run(programs.filled, 1.0, schedule="sometimes")


def test_a_function_that_hangs_is_ended_and_shows_where() -> None:
    with pytest.raises(DeadlineError) as caught:
        run(never_return, deadline_s=3.0)
    assert any("never_return" in note for note in caught.value.__notes__)


def test_no_device_is_made_behind_torch() -> None:
    with pytest.raises(UsageError, match="before PyTorch"):
        install()


def test_a_build_for_the_pytorch_of_another_environment_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would load the libraries of that one, or none where that environment is gone."""
    GUARD.build()
    assert GUARD.built() is not None
    monkeypatch.setattr(torchextension, "_torch_folder", lambda: tmp_path)
    assert GUARD.built() is None


def test_the_guides_program_shows_its_missing_wait(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(GUIDE.read_text().partition("```python\n")[2].partition("```")[0])
    command = [sys.executable, "-m", "tests.simdevice", "--schedule", "lazy"]
    done = subprocess.run([*command, str(program)], capture_output=True, text=True, check=True)
    assert "\n" + done.stdout in GUIDE.read_text()
    assert done.stdout != "[2.0, 2.0, 2.0, 2.0]\n"
    assert done.stderr == "simulated device: 0 problems, 1 waits\n"
