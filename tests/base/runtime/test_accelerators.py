"""Device files of accelerators."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from ckptd.base.runtime.accelerators import accelerators_here, device_file, gpus_here


def test_files_that_a_process_with_a_device_has_open() -> None:
    for path in (
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/kfd",
        "/dev/dri/renderD128",
        "/dev/accel/accel0",
        "/dev/davinci_manager",
        "/dev/hisi_hdc",
        "/dev/neuron0",
    ):
        assert device_file(path), path
    for path in ("/dev/null", "/dev/shm/nvidia", "/dev/driver", "/tmp/dev/nvidia0", ""):
        assert not device_file(path), path


@pytest.mark.parametrize(
    ("files", "wanted", "gpus"),
    [
        ([], (), 0),
        (["/dev/nvidiactl", "/dev/dri/renderD128"], (), 0),  # no card of its own; a display's?
        (["/dev/nvidia0", "/dev/nvidia1", "/dev/dri/renderD128"], ("NVIDIA",), 2),
        (["/dev/kfd", "/dev/davinci3"], ("AMD", "Ascend"), 0),
        (["/dev/kfd", "/dev/dri/card0", "/dev/dri/renderD128"], ("AMD",), 1),
    ],
)
def test_what_a_machine_surely_has(
    monkeypatch: pytest.MonkeyPatch, files: list[str], wanted: tuple[str, ...], gpus: int
) -> None:
    def found(pattern: str) -> list[str]:
        return [path for path in files if fnmatch(path, pattern)]

    monkeypatch.setattr("ckptd.base.runtime.accelerators.glob.glob", found)
    assert accelerators_here() == wanted
    assert gpus_here() == gpus
