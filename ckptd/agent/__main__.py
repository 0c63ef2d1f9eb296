"""``python -m ckptd.agent``: how a checkpointer starts the agent of its node."""

from __future__ import annotations

import argparse
import signal
import socket

from ckptd.agent.node import NodeAgent
from ckptd.engine.agentlink import AgentPlace


def main() -> None:
    """Serve on the listening socket that was passed on, until nothing is left to do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--folder", required=True)
    given = parser.parse_args()
    place = AgentPlace(given.job, given.node, given.folder)
    agent = NodeAgent(socket.socket(fileno=given.fd), place)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.end())
    agent.run()


if __name__ == "__main__":
    main()
