"""The simulated cluster of a run of fleet schedules: a head without places, and nodes that can be lost."""

from __future__ import annotations

import contextlib
import importlib
import signal
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.fleet_plan import NODES

CPUS_EACH = 2
# A node that falls silent is dead after seconds instead of a quarter of a minute.
HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
QUIET = {"include_dashboard": False, "num_gpus": 0}
ray: Any = importlib.import_module("ray")


class Nodes:
    """`folder` is Ray's. `orphans` are the processes of a lost node that have to notice its end by themselves; `going`
    are nodes that are about to be lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orphans: list[psutil.Process] = []
        self.going: set[str] = set()
        head = {**QUIET, "num_cpus": 0, "temp_dir": str(folder), "_system_config": HEALTH}
        self._cluster = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
        self.fill()

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def cpus(self) -> int:
        """Of the nodes that are there."""
        return CPUS_EACH * len(self._cluster.worker_nodes)

    def ids(self) -> set[str]:
        """Of the nodes that are there to stay."""
        return {node.node_id for node in self._cluster.worker_nodes} - self.going

    def fill(self) -> None:
        """As many nodes as in the beginning. Ray sets signal handlers for each, so this is for the main thread."""
        while len(self._cluster.worker_nodes) < NODES:
            self._cluster.add_node(num_cpus=CPUS_EACH, **QUIET)

    def lose(self, identity: str, *, at_once: bool, frozen_s: float = 0) -> None:
        """SIGKILL of a node, and `at_once` of all that runs on it; before, it is frozen for that long, as a machine is
        that swaps.
        """
        node = next(node for node in self._cluster.worker_nodes if node.node_id == identity)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        workers = raylet.children(recursive=True)
        if frozen_s:
            _signal([raylet, *workers], signal.SIGSTOP)
            time.sleep(frozen_s)
            _signal([raylet, *workers], signal.SIGCONT)
        _signal([raylet, *(workers if at_once else ())], signal.SIGKILL)
        self.orphans += workers
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def simulated_cluster() -> Generator[Nodes]:
    """One for all schedules; its folder's name is short because Ray puts sockets into it."""
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as folder:
        nodes = Nodes(Path(folder))
        try:
            ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            nodes.close()
