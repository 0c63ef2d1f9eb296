"""Four machines for a real job: networks, clocks and disks of their own, on this one.

A namespace is a machine's network. A shim before its processes is its clock and its disk: the
clock is off by what its file says, and a flush takes as long. The disk of the root is a tmpfs that
can be filled. Needs root, gcc and namespaces.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

from tests.monitor.cluster.namespaces import Network

__all__ = ["Machines"]

_DISK = "size=24m"
_PIECE = bytes(1 << 16)
_SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none[2], *told = none;  /* ns: the clock is off, a flush takes */
static int (*clock_of)(clockid_t, struct timespec *);
static int (*flush)(int), (*flush_data)(int);

__attribute__((constructor)) static void begin(void) {
    clock_of = dlsym(RTLD_NEXT, "clock_gettime");
    flush = dlsym(RTLD_NEXT, "fsync");
    flush_data = dlsym(RTLD_NEXT, "fdatasync");
    const char *path = getenv("LIVE_MACHINE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *at = mmap(0, 16, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) told = at;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *out) {
    if (!clock_of) begin();
    int code = clock_of(id, out);
    if (code || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) return code;
    int64_t ns = out->tv_nsec + told[0] % 1000000000;
    out->tv_sec += told[0] / 1000000000;
    if (ns < 0) { ns += 1000000000; out->tv_sec--; }
    if (ns >= 1000000000) { ns -= 1000000000; out->tv_sec++; }
    out->tv_nsec = ns;
    return 0;
}

int gettimeofday(struct timeval *out, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static void slowly(void) {
    struct timespec rest = {told[1] / 1000000000, told[1] % 1000000000};
    if (told[1] > 0) nanosleep(&rest, 0);
}

int fsync(int fd) { slowly(); return flush(fd); }
int fdatasync(int fd) { slowly(); return flush_data(fd); }
"""


class Machines:
    """Machines of these names, and one more that nothing is done to; see the module.

    Parameters
    ----------
    folder
        Of the job, new; the disk of the root is ``disk`` in it.
    names
        Of the nodes; the harness itself is at their router from then on.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder, self.names = folder, names
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._balloon = self.disk / "balloon"
        source, self._shim = folder / "shim.c", folder / "shim.so"
        source.write_text(_SHIM)
        build = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(self._shim), str(source), "-ldl"]
        subprocess.run(build, check=True, timeout=60)
        for name in [*names, "beside"]:
            self._file(name).write_bytes(bytes(16))
        self._told = {name: [0, 0] for name in names}
        mount = ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(self.disk)]
        subprocess.run(mount, check=True, timeout=60)
        self.network = Network(len(names) + 1)
        self.network.enter_hub()

    def close(self) -> None:
        self.network.close()
        subprocess.run(["umount", "-l", str(self.disk)], check=False, timeout=60)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.machine"

    def address(self, name: str) -> str:
        """Return where a node, or ``beside``, is."""
        return self.network.address([*self.names, "beside"].index(name))

    def under(self, name: str) -> list[str]:
        """Return the words that put a command on a machine."""
        run = self.folder / "run" / name
        run.mkdir(mode=0o700, exist_ok=True)
        space = self.network.spaces[[*self.names, "beside"].index(name)]
        return [
            *("nsenter", f"--net=/run/netns/{space}", "env"),
            f"CKPTD_RUN_DIR={run}",
            f"CKPTD_HOST=h-{name}",
            f"CKPTD_BIND={self.address(name)}",
            f"LIVE_MACHINE={self._file(name)}",
            f"LD_PRELOAD={self._shim}",
            "GLOO_SOCKET_IFNAME=eth0",
        ]

    # --- what is done to them ---------------------------------------------------------------------

    def set_clock(self, name: str, seconds: float) -> None:
        """Let a clock be off by so much from now on."""
        self._tell(name, 0, seconds)

    def slow_disk(self, name: str, seconds: float) -> None:
        """Let each flush take so much longer."""
        self._tell(name, 1, seconds)

    def _tell(self, name: str, which: int, seconds: float) -> None:
        self._told[name][which] = int(seconds * 1e9)
        fd = os.open(self._file(name), os.O_WRONLY)
        try:
            os.pwrite(fd, struct.pack("qq", *self._told[name]), 0)
        finally:
            os.close(fd)

    def fill_disk(self) -> None:
        """Leave no room on the disk of the root."""
        with self._balloon.open("ab", buffering=0) as file:
            try:
                while file.write(_PIECE):
                    pass
            except OSError:  # full, as it should be
                pass

    def empty_disk(self) -> None:
        self._balloon.unlink(missing_ok=True)

    def heal(self) -> None:
        """Undo all but cuts, which end by themselves."""
        self.empty_disk()
        for name in self.names:
            self.set_clock(name, 0.0)
            self.slow_disk(name, 0.0)
