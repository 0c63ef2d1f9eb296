"""A node of a probed network: answers probes, and sends those that it is told to.

Standard input has one probe a line, msgpack in hexadecimal (JSON has no infinity); its result goes
to standard output.
"""

from __future__ import annotations

import sys

import msgspec

from ckptd.monitor.agent.probes import listen_for_probes, measure, shown_address
from ckptd.monitor.report import LinkProbe

SECRET = b"a secret of the tests"


def main(host: str) -> None:
    with listen_for_probes(SECRET, host) as answerer:
        print(shown_address(answerer, host), flush=True)
        for line in sys.stdin:
            result = measure(msgspec.msgpack.decode(bytes.fromhex(line), type=LinkProbe), SECRET)
            print(msgspec.msgpack.encode(result).hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
