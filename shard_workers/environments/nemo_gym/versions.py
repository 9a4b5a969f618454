"""NeMo Gym's own API: the one file that imports it, and the one that knows how its versions differ.

| what | 0.4 | 0.5 and newer |
|---|---|---|
| a row without `agent_ref` | its `task_source` must be turned into an agent here | Gym does it |
| a failed start | leaves what was started running | Gym ends it (the supervisor would, too) |
| `environment_servers` | none | listed like the other server types |
| Ray | every server joins it | only servers that say so |

Group identity is stamped for both: 0.4 reads `_ng_task_index`, newer ones `_ng_group_id` and `_ng_group_attempt`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from ....broker.errors import RouteError
from ..entry_shapes import GYM_SERVER_TYPES
from .ports import free_port
from .settings import GROUP_SIZE_KEY, Verifier

AGENTS = "responses_api_agents"
RESOURCES = "resources_servers"
RAY_ADDRESS_KEY = "ray_head_node_address"
LOCAL = "127.0.0.1"
# Gym's own default range.
_PORTS = (10_001, 20_000)
_RAY_TRIES = 3


class Gym:
    """One running stack; there can be only one in a process, because Gym keeps its config and HTTP client global."""

    def __init__(self, config: Mapping[str, Any], *, one_venv: bool, folder: Path) -> None:
        """Import Gym and complete the config; `folder` is ours to write to."""
        _search_path_for_uv()
        self._config = _module("nemo_gym.global_config")
        self._servers = _module("nemo_gym.server_utils")
        self._runner = _module("nemo_gym.cli.env").RunHelper()
        self.version = importlib.metadata.version("nemo-gym")
        # From 0.5 on, Gym turns a task_source into an agent itself.
        self._resolves_task_sources = hasattr(
            _module("nemo_gym.rollout_collection").RolloutCollectionHelper, "resolve_task_sources"
        )
        self._initial = _completed(config)
        if one_venv:
            self._initial |= {"uv_venv_dir": str(folder / "venvs"), "skip_venv_if_present": True}
            self._link_own_venv(folder / "venvs")
        self._tasks: list[asyncio.Task[Any]] | None = None

    def read(self) -> None:
        """Have Gym read and check the whole config, once and for all; nothing is started, and what it raises is
        raised.
        """
        self._plain: dict[str, Any] = _container(self._config.get_global_config_dict(self._parser_config()))

    def start(self) -> None:
        """Start every server and return when all answer; blocks, and raises what Gym raises."""
        config: Any = self._config.get_global_config_dict()
        if not config.get(RAY_ADDRESS_KEY):
            address = _own_ray()
            with open_dict(config):
                config[RAY_ADDRESS_KEY] = address
        self._runner.start(self._parser_config())
        self._collection = self._make_collection()

    def poll(self) -> None:
        """Raise `RuntimeError` naming the server that has died."""
        self._runner.poll()

    def entries(self) -> dict[str, list[str]]:
        """`{entry: [server type, …]}` of what runs."""
        found = {name: [kind for kind in GYM_SERVER_TYPES if kind in entry] for name, entry in self._mappings().items()}
        return {name: kinds for name, kinds in found.items() if kinds}

    def verifiers(self) -> dict[str, Verifier]:
        """By route (agents, and resources servers themselves): the verifiers that wait for siblings."""
        servers = {name: self._server(name, RESOURCES) for name in self._mappings()}
        waiting = {name: int(s[GROUP_SIZE_KEY]) for name, s in servers.items() if int(s.get(GROUP_SIZE_KEY) or 1) > 1}
        routes = {name: Verifier(name, size) for name, size in waiting.items()}
        for agent in self._mappings():
            target = self._resources_of(agent)
            if target in waiting:
                routes[agent] = Verifier(target, waiting[target])
        return routes

    def addressed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row in the form that this version routes; raises `RouteError` where no agent is meant, or several are."""
        given: Any = row.get("agent_ref")
        if self._resolves_task_sources or (given and given.get("name")):
            return dict(row)
        return {**row, "agent_ref": {"name": self._agent_for(str(row.get("task_source")))}}

    async def rollout(self, row: dict[str, Any]) -> dict[str, Any]:
        """Run one row through Gym's collection; raises what Gym raises. Cancelled, it ends Gym's own task as well."""
        owned: list[asyncio.Task[Any]] = []
        try:
            with self._owning(owned):
                # Gym's tasks are made inside this call, and nowhere else can they be taken hold of.
                answer = next(iter(self._collection.run_examples([row])))
            return cast("dict[str, Any]", (await answer)[1])
        finally:
            for task in owned:
                task.cancel()
            await asyncio.gather(*owned, return_exceptions=True)

    def make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """The event loop's task factory, which lets `rollout` know what Gym starts."""
        task = asyncio.Task(work, loop=loop, **options)
        if self._tasks is not None:
            self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Close Gym's HTTP client, which belongs to this event loop."""
        client: Any = self._servers._GLOBAL_AIOHTTP_CLIENT
        self._servers._GLOBAL_AIOHTTP_CLIENT = None
        if client is not None:
            await client.close()

    @contextmanager
    def _owning(self, owned: list[asyncio.Task[Any]]) -> Generator[None]:
        self._tasks = owned
        try:
            yield
        finally:
            self._tasks = None

    def _parser_config(self) -> Any:
        return self._config.GlobalConfigDictParserConfig(
            skip_load_from_cli=True, initial_global_config_dict=DictConfig(self._initial)
        )

    def _make_collection(self) -> Any:
        """Gym's helper with one client for all calls: its own way asks the head server for the whole config every
        time.
        """
        base: Any = _module("nemo_gym.rollout_collection").RolloutCollectionHelper
        client: Any = self._servers.ServerClient(
            head_server_config=self._servers.ServerClient.load_head_server_config(),
            global_config_dict=self._config.get_global_config_dict(),
        )

        def setup_server_client(_self: Any, head_server_config: Any = None) -> Any:
            if not self._servers.is_global_aiohttp_client_setup():
                limits = self._servers.GlobalAIOHTTPAsyncClientConfig.model_validate(client.global_config_dict)
                self._servers.set_global_aiohttp_client(limits)
            return client

        return type("Collection", (base,), {"setup_server_client": setup_server_client})()

    def _mappings(self) -> dict[str, dict[str, Any]]:
        return {name: value for name, value in self._plain.items() if isinstance(value, dict)}

    def _server(self, name: str, kind: str) -> dict[str, Any]:
        """The settings of the server of one kind that an entry holds; empty if it holds none."""
        servers: Any = self._plain[name].get(kind)
        inner: Any = next(iter(cast("dict[str, Any]", servers).values()), None) if isinstance(servers, dict) else None
        return cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}

    def _resources_of(self, agent: str) -> str:
        reference: Any = self._server(agent, AGENTS).get("resources_server")
        return str(cast("dict[str, Any]", reference).get("name", "")) if isinstance(reference, dict) else ""

    def _agent_for(self, source: str) -> str:
        mappings = self._mappings()
        if AGENTS in mappings.get(source, {}):
            return source
        agents = [name for name in mappings if source and self._resources_of(name) == source]
        if len(agents) != 1:
            found = f"{len(agents)} agents use it ({', '.join(agents)})" if agents else "no agent uses it"
            raise RouteError(
                f"task_source {source!r} names no single agent: {found}; give the row an `agent_ref: {{name: AGENT}}`"
            )
        return agents[0]

    def _link_own_venv(self, folder: Path) -> None:
        parsed: Any = self._config.GlobalConfigDictParser().parse_no_environment(DictConfig(self._initial))
        self._plain = _container(parsed)
        for name, kinds in self.entries().items():
            for kind in kinds:
                link = folder / kind / next(iter(self._plain[name][kind])) / ".venv"
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.is_symlink():
                    link.symlink_to(sys.prefix)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _container(config: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what two stacks on one machine would otherwise share by default."""
    low, high = config.get("port_range_low") or _PORTS[0], config.get("port_range_high") or _PORTS[1]
    head = {"host": LOCAL, "port": free_port(LOCAL, low, high)}
    return {"default_host": LOCAL, "head_server": head, "policy_api_key": "unused", **config}


def _search_path_for_uv() -> None:
    # Gym's shell looks up uv, and uv a base interpreter.
    folders = [f"{sys.prefix}/bin", os.environ.get("PATH", ""), f"{sys.base_prefix}/bin"]
    os.environ["PATH"] = os.pathsep.join(folder for folder in folders if folder)


def _own_ray() -> str:
    """Start a small Ray for this stack alone; Gym's default one has a dashboard and more."""
    ray = _module("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for tries_left in reversed(range(_RAY_TRIES)):
        try:
            # Without an address Ray would join whatever cluster was last started on this machine.
            ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="warning")
            break
        except Exception:
            # Ray gives its node 30 s, which cannot be changed and is short where several stacks start at once.
            if not tries_left:
                raise
            ray.shutdown()
    return str(ray.get_runtime_context().gcs_address)
