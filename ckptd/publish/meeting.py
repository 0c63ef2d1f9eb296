"""How workers find a publisher: folder, address (``tcp://``) or store, and the secret's file.

In it: how large its file may be; loopback addresses.

What stands in the file is not trusted: it leads to a server, which has to prove that it knows the
job's secret before anything else is believed.
"""

from __future__ import annotations

import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckptd.base.net.address import Address, is_loopback, parse_address
from ckptd.base.net.handed import Proof, given_proof
from ckptd.base.net.signing import SECRET_VARIABLE, checked_secret, secret_of
from ckptd.errors import UsageError
from ckptd.publish.messages import DIRECTORY, ServerEntry

_FILE = "publisher.json"
_SECRET_FILE = "publisher-secret"
_MOST_BYTES = 32 << 10


def is_store(at: str | os.PathLike[str]) -> bool:
    """Whether a place is one in a store, and no folder to meet in."""
    text = os.fspath(at)
    return "://" in text and not text.startswith("tcp://")


@dataclass(frozen=True)
class MeetingPlace:
    """Where a publisher and its workers find each other.

    Attributes
    ----------
    folder
        A folder that all see; None where rank 0's server has an address of its own.
    address
        That address.
    proof
        What both sides prove themselves by.
    """

    folder: Path | None
    address: Address | None
    proof: Proof

    @staticmethod
    def of(at: str | os.PathLike[str], secret: str | bytes | None = None) -> MeetingPlace:
        """Read what a program gives as `at`.

        Parameters
        ----------
        at
            A folder, or ``tcp://HOST:PORT``.
        secret
            Where it is None: ``CKPTD_SECRET``, or a certificate from this process's launcher, which
            has that; without both, in a folder, that of a file there, which is made on first use.

        Raises
        ------
        UsageError
            Neither. There is none, or it is too short.
        RefusedError
            Others may write into the folder, and no secret is given.
        """
        if secret is None:
            given = given_proof()
        else:
            raw = secret.encode() if isinstance(secret, str) else secret
            given = checked_secret(raw, "secret=")
        text = os.fspath(at)
        if text.startswith("tcp://"):
            address = parse_address(text.removeprefix("tcp://"), "a publisher's address")
            if given is None:
                raise UsageError(
                    "a publisher at an address needs a secret",
                    where=text,
                    hint=f"set {SECRET_VARIABLE} to the same long random text on all nodes, "
                    "or give secret=",
                )
            return MeetingPlace(None, address, given)
        if "://" in text:
            raise UsageError(
                "invalid address of a publisher",
                wanted="a folder shared by all nodes, or tcp://HOST:PORT",
                found=text[:200],
                hint="Publisher(to=...) takes URLs of stores",
            )
        folder = Path(text)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return MeetingPlace(folder, None, given or secret_of(folder / _SECRET_FILE))

    def announce(self, entry: ServerEntry) -> None:
        """Announce rank 0's server to workers; it takes the place of an earlier one."""
        if self.folder is None:
            return
        draft = self.folder / f".{_FILE}.{secrets.token_hex(6)}"
        draft.write_bytes(msgspec.json.encode(entry))
        os.replace(draft, self.folder / _FILE)

    def find(self) -> ServerEntry | None:
        """Return where rank 0's server should be; None: nothing has been published here."""
        if self.address is not None:
            return ServerEntry("", str(self.address), "", "")
        if self.folder is None:
            return None
        try:
            with open(self.folder / _FILE, "rb", opener=_opened) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                raw = file.read(_MOST_BYTES + 1)
            return DIRECTORY.decode(raw) if len(raw) <= _MOST_BYTES else None
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    @property
    def loopback(self) -> bool:
        """Whether the address is reached from this machine alone."""
        return self.address is not None and is_loopback(self.address.host)


def _opened(path: str, flags: int) -> int:
    """Open a file; a fifo in its place must not block that."""
    return os.open(path, flags | os.O_NONBLOCK)
