"""Two nodes on this machine: network namespaces, an address each, with a link between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

LINK = "weft0"  # the name of the link's end in each node
PORT = 29511
# Otherwise the first node's agent announces the meeting place once, and not to an agent started later (torch 2.13).
JOINS_AGAIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FRAME = 9000  # bytes, as in a machine room, so that headers are a hundredth of a frame


class Node:
    """A node. `number` counts from 0; ranks meet at node 0."""

    def __init__(self, number: int) -> None:
        self.name, self.address = f"weft-{os.getpid()}-{number}", f"10.99.7.{number + 1}"
        self._first = number == 0

    def add(self) -> None:
        _ip("netns", "add", self.name)

    def connect(self) -> None:
        """Sets up this end of the link."""
        self.inside("ip", "address", "add", f"{self.address}/24", "dev", LINK)
        for device in ("lo", LINK):
            self.inside("ip", "link", "set", device, "up")

    def inside(self, *command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.name, *command], check=True, capture_output=True)

    def torchrun(self, ranks: int, log: Path, *program: str, restarts: int = 0) -> subprocess.Popen[bytes]:
        """Start torchrun's agent on this node with this many ranks; all output is appended to `log`."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "weft", "--rdzv-endpoint", f"{Node(0).address}:{PORT}"]
        command += ["--rdzv-conf", f"is_host={int(self._first)}", "--local-addr", self.address, *program]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            **JOINS_AGAIN,
            "GLOO_SOCKET_IFNAME": LINK,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
        }
        with log.open("ab") as file:
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def processes(self) -> list[int]:
        """The ids of all processes on the node."""
        said = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False).stdout
        return [int(line) for line in said.split()]

    def kill(self) -> None:
        """Kill all processes of the node with the link down, so that the peer node hears nothing."""
        with suppress(subprocess.CalledProcessError):
            self.inside("ip", "link", "set", LINK, "down")
        while found := self.processes():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach each other, removed at the end. Skips the test if they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` here, which makes network namespaces: apt install iproute2")
    nodes = Node(0), Node(1)
    try:
        try:
            for node in nodes:
                node.add()
            one, other = (("name", LINK, "mtu", str(FRAME), "netns", node.name) for node in nodes)
            _ip("link", "add", *one, "type", "veth", "peer", *other)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
        for node in nodes:
            node.connect()
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, check=False)


def slow_down(nodes: tuple[Node, Node], rate: str) -> None:
    """Limit the link to a rate such as "1gbit" each way. Skips the test if links cannot be limited."""
    if shutil.which("tc") is None:
        pytest.skip("there is no `tc` here, which slows links: apt install iproute2")
    for node in nodes:
        bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "400ms"]
        try:
            node.inside("tc", "qdisc", "add", "dev", LINK, "root", *bucket)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"links cannot be slowed here: {error.stderr.decode().strip()}")
