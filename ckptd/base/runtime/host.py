"""The machine: memory and control groups, limits, mounts, versions, node name, address.

In it: the environment that bug reports show, and which secrets are hidden; open files; the address
towards other nodes (``CKPTD_BIND``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import resource
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ckptd.base.runtime.pool import cores
from ckptd.errors import UsageError, size_text

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping: of the machine or the container.

    Page cache counts as available, since the kernel gives it back.
    """
    try:
        with open("/proc/meminfo", "rb") as file:
            found = next(line for line in file if line.startswith(b"MemAvailable:"))
            machine = int(found.split()[1]) << 10
    except (OSError, StopIteration):  # no Linux
        import psutil

        machine = int(psutil.virtual_memory().available)
    rooms = (room for room in map(_room, memory_groups()) if room is not None)
    return min([machine, *rooms])


def memory_groups(groups: Path | None = None, own: Path | None = None) -> Iterator[Path]:
    """Yield the folder of this process's memory control group, and of those around it.

    Parameters
    ----------
    groups, own
        Where control groups are mounted, and what names this process's; in tests other ones.
    """
    try:
        lines = (own or _OWN).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = (groups or _CGROUP) / ("memory" if controllers else "")
        folder = top / name.lstrip("/")
        if not folder.exists():  # the path is the host's, the mount is the container's
            folder = top
        yield folder
        yield from (f for f in folder.parents if f.is_relative_to(top))


def kill_counts(groups: Path | None = None, own: Path | None = None) -> Iterator[Path]:
    """Yield the files that count kills for lack of memory, of the groups of `memory_groups`."""
    names = ("memory.events", "memory.oom_control")  # of the second version, and of the first
    return (f for g in memory_groups(groups, own) for n in names if (f := g / n).exists())


def _room(folder: Path) -> int | None:
    """Return the room below the memory limit of a control group; None where it has none."""
    limit, usage, prefix = "memory.max", "memory.current", ""
    if not (folder / limit).exists():  # of the first version
        limit, usage, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _NO_LIMIT:
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
        return max(0, int(most) - used + cache)
    except (OSError, ValueError):
        return None


BIND_VARIABLE = "CKPTD_BIND"
"""Address by which other nodes reach this one."""

PACKAGES = (
    "ckptd",
    "numpy",
    "ml_dtypes",
    "msgspec",
    "xxhash",
    "zstandard",
    "safetensors",
    "fsspec",
    "botocore",
    "torch",
)
_MOST_NAME_BYTES = 64
_SETTINGS = re.compile(r"(CKPTD|AWS|FSSPEC|S3|GOOGLE_CLOUD|AZURE)_\w+|\w*_proxy|\w*_PROXY|TMPDIR")
_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|SAS", re.IGNORECASE)
_USERINFO = re.compile(r"(://)[^/@]*@")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the system and the packages that matter; None: not there."""
    import importlib.metadata  # 40 modules that no writing process needs

    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def many_files() -> None:
    """Allow as many files and connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def environment() -> dict[str, str]:
    """Return limits of this process and the variables that matter, without secrets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = {
        "cores": str(cores()),
        "memory available": size_text(available_bytes()),
        "open files": f"{soft} of at most {hard}",
    }
    shm = Path("/dev/shm")
    if shm.is_dir():
        stat = os.statvfs(shm)
        found["/dev/shm free"] = size_text(stat.f_bavail * stat.f_frsize)
    for name in sorted(filter(_SETTINGS.fullmatch, os.environ)):
        secret = _SECRET.search(name)
        found[name] = "***" if secret else _USERINFO.sub(r"\1***@", os.environ[name])
    return found


def host_id() -> str:
    """Name the host as its processes see it: containers with their own names share nothing.

    ``CKPTD_NODE`` names it otherwise: several nodes on one machine, for rehearsals.
    """
    if given := os.environ.get("CKPTD_NODE"):
        return given
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read(13)  # 48 random bits: enough, and people read it
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def loopback() -> str:
    """Return the loopback address of this machine: of IPv6 where it has none of IPv4."""
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return host
    raise UsageError(
        "this machine has no loopback address, by which its processes reach each other",
        wanted="127.0.0.1 or ::1",
        found="no way to either",
        hint="ip link set lo up",
    )


def address_towards(host: str) -> str:
    """Return the address by which `host`, and so the job's other nodes, reach this one.

    That of the interface through which `host` is reached; ``CKPTD_BIND`` overrides it. The loopback
    address where `host` is this very machine, or is not known.
    """
    if given := os.environ.get(BIND_VARIABLE):
        return given
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it only picks the interface
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return loopback()


def node_name(given: str | None = None) -> str:
    """Return the name of this host, or the one given, as rings and agents have it.

    At most 64 bytes; longer names that differ stay different.
    """
    name = given or host_id()
    raw = name.encode()
    if len(raw) <= _MOST_NAME_BYTES:
        return name
    return f"{raw[:55].decode(errors='ignore')}~{zlib.crc32(raw):08x}"


def pid_space() -> str:
    """Name the space of process ids that this process counts in; containers have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Mount(msgspec.Struct, frozen=True):
    """Where a path lies: type of the file system, what is mounted, and where."""

    kind: str
    source: str
    point: str


def mount_of(path: str | os.PathLike[str]) -> Mount | None:
    """Return the mount that holds `path`, which need not exist; None where that is unknown."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for _, mount in _mounts():
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # Of two mounts on one point the later one is seen.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def limit_of(error: object) -> str | None:
    """Say which limit of this process an error of the system is about; None for any other."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return f"this process may have {most} open files: raise `ulimit -n`"
    if code != errno.EFBIG:
        return None
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        return "the file system does not support a file of that size (FAT: 4 GiB)"
    return f"this process may make files of {most} bytes, memory files too: raise `ulimit -f`"


def filesystem_of(device: int) -> str | None:
    """Return the type of the file system that is mounted of a device; None where unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for number, mount in _mounts() if number == wanted), None)


def _mounts() -> Iterator[tuple[str, Mount]]:
    """Yield the mounts that this process sees, each with the numbers of its device."""
    try:
        lines = os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n")
    except OSError:
        return
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 5 and len(tail) >= 2:
            yield fields[2], Mount(tail[0], tail[1], fields[4].replace("\\040", " "))


def mapped_files() -> Iterator[str]:
    """Yield the path of each mapping of a file in this process, some of them several times.

    A mapping stays when its file is closed. What has no file has a name in brackets, or none.
    """
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
        fields = line.split(maxsplit=5)  # a path may hold spaces
        if len(fields) == 6:
            yield os.fsdecode(fields[5])
