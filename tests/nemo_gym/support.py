"""A canned model that can go down and hang, configs of small real stacks, and the processes they leave, if any."""

from __future__ import annotations

import importlib.util
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from examples.nemo_gym.model_server import AnswerKey, ModelServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Row = dict[str, Any]


def shipped(environment: str) -> Path:
    """The example rows of an environment that NeMo Gym ships."""
    found = importlib.util.find_spec("nemo_gym")
    assert found is not None, "NeMo Gym is not installed here; run .ci/nemo_gym"
    assert found.origin is not None
    return Path(found.origin).parents[1] / "resources_servers" / environment / "data" / "example.jsonl"


def example_rows(environment: str, agent: str, generations: int = 4) -> list[Row]:
    """The shipped rows, each as one group; siblings differ by temperature, and so the canned model's answers."""
    rows: list[Row] = []
    for task, line in enumerate(shipped(environment).read_text().splitlines()):
        for sibling in range(generations):
            row: Row = json.loads(line)
            row["responses_create_params"]["temperature"] = sibling / 4
            rows.append({**row, "agent_ref": {"name": agent}, "_ng_task_index": task, "_ng_rollout_index": sibling})
    return rows


class Model:
    """The canned model on a port it keeps. Each request waits while `held`, where its prompt says so."""

    def __init__(self) -> None:
        self.key = AnswerKey([shipped("mcqa"), shipped("workplace_assistant")])
        self._connections: set[socket.socket] = set()
        self.port = 0
        self.reset()
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def reset(self, intercept: Callable[[str, Any], Any] = lambda path, request: None) -> None:
        """Answer as a good model does, but for what `intercept` answers."""
        self._intercept = intercept

    def up(self) -> None:
        connections = self._connections

        class Server(ModelServer):
            def get_request(self) -> tuple[socket.socket, Any]:
                connection, address = super().get_request()
                connections.add(connection)
                return connection, address

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Connections that the test cut are no error."""

        self._server = Server(self.key, self.port)
        self.port = self._server.server_port
        self._server.intercept = self._answer
        self._server.start()

    def _answer(self, path: str, request: Any) -> Any:
        return self._intercept(path, request)

    def down(self) -> None:
        """Stop listening and cut every connection, as a killed process does."""
        self._server.shutdown()
        self._server.server_close()
        while self._connections:
            connection = self._connections.pop()
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Held:
    """Requests that wait until `release`; `arrived` counts them."""

    def __init__(self, which: Callable[[Any], bool] = lambda request: True) -> None:
        self.arrived = threading.Semaphore(0)
        self._open = threading.Event()
        self._which = which

    def __call__(self, path: str, request: Any) -> None:
        if path == "/v1/chat/completions" and self._which(request) and not self._open.is_set():
            self.arrived.release()
            self._open.wait(60)

    def release(self) -> None:
        self._open.set()


def gym_config(model: Model, *paths: str, ports: tuple[int, int], **more: Any) -> dict[str, Any]:
    """A stack of `paths` beside the policy model, in this very virtual environment."""
    return {
        "config_paths": ["responses_api_models/vllm_model/configs/vllm_model_for_training.yaml", *paths],
        "policy_base_url": [model.url],
        "policy_model_name": "canned",
        "port_range_low": ports[0],
        "port_range_high": ports[1],
        "rolloutbus_one_venv": True,
        **more,
    }


def shipped_config(environment: str) -> str:
    return f"resources_servers/{environment}/configs/{environment}.yaml"


def is_server(process: psutil.Process, name: str = "") -> bool:
    """Whether it is one of Gym's servers, or the one of this name."""
    try:
        served = process.environ().get("NEMO_GYM_CONFIG_PATH")
        return process.name().startswith("python") and (served == name if name else served is not None)
    except psutil.Error:
        return False


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all that came from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def still_there(processes: list[psutil.Process], seconds: float = 15.0) -> list[psutil.Process]:
    """Those that have not ended after a while; zombies count."""
    return psutil.wait_procs(processes, timeout=seconds)[1]
