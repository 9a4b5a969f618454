"""`environment: nemo_gym`: real NeMo Gym servers behind a worker.

The stack runs in a process tree of its own, so a worker that blocks, dies or is killed neither disturbs it nor leaves
it behind. Added to what Gym does: a deadline per row, health that sees a dead server, failures as plain exceptions,
cancellation that reaches Gym's own tasks, and a group identity no other attempt has.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....broker.errors import ClosedError, ConfigError, EnvironmentContractError
from ....broker.routes import route_of
from ..base import Row, RowOutcome
from ..identity import restore, stamped
from ..import_path import NotImportableError
from .errors import GymStackError, GymStartError, unpack_error
from .settings import GymSettings, Verifier, check_group, split_config
from .stack import GymStack
from .versions import RAY_ADDRESS_KEY
from .wire import Message, Wire, encode

log = logging.getLogger("rolloutbus.nemo_gym")

LOG_DIR_KEY = "nemo_gym_log_dir"
# Gym answers a cancellation at once; what does not is a host that hangs.
_END_PATIENCE_S = 10.0
_GONE = "the process that hosts NeMo Gym has ended; its output says why"


def require_gym() -> None:
    """Raise `NotImportableError` where NeMo Gym is not installed."""
    if importlib.util.find_spec("nemo_gym") is None:
        raise NotImportableError(
            "rolloutbus.environment: 'nemo_gym' needs NeMo Gym, which is not installed here; "
            "use Python 3.12 or newer and install rolloutbus[nemo-gym]"
        )


class NemoGymEnvironment:
    """One Gym stack; see `base.Environment` for the contract, and `GymSettings` for the keys beside Gym's own."""

    # Asks the host's own thread, so it answers while this process is busy.
    health_in_any_thread = True

    def __init__(self) -> None:
        self._stack: GymStack | None = None
        self._wire: Wire | None = None
        self._entries: dict[str, list[str]] = {}
        self._verifiers: dict[str, Verifier] = {}
        self._calls: dict[int, asyncio.Queue[Message]] = {}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._settings = GymSettings()

    async def start(self, config: Mapping[str, Any]) -> None:
        """Start Gym's servers from the shard's merged config and wait until all answer.

        Raises `ConfigError` where Gym is not installed or a key of ours is wrong, and `GymStartError` with what Gym
        said.
        """
        if self._stack is not None:
            raise EnvironmentContractError("this environment is started already; stop it before starting it again")
        require_gym()
        self._settings, gym = split_config(config)
        ray_address = _address_of_running_ray()
        if ray_address:
            gym.setdefault(RAY_ADDRESS_KEY, ray_address)
        self._stack = GymStack.launch(self._settings, _output_file(gym.get(LOG_DIR_KEY)))
        try:
            await self._begin(self._stack, gym)
        except BaseException:
            await self.stop()
            raise

    async def _begin(self, stack: GymStack, gym: dict[str, Any]) -> None:
        self._wire = await Wire.over(stack.rows)
        await self._wire.send({"settings": self._settings.model_dump(), "config": gym})
        answer = await self._wire.receive()
        if answer is None:
            raise GymStartError("the process that hosts NeMo Gym ended while it started; its output says why")
        if "error" in answer:
            raise _start_error(answer["error"])
        self._entries = answer["entries"]
        self._verifiers = {route: Verifier(*values) for route, values in answer["verifiers"].items()}
        self._reading = asyncio.create_task(self._read(self._wire), name="NeMo Gym results")
        log.info("NeMo Gym %s is up with %s", answer["version"], ", ".join(self._entries))

    def list_entries(self) -> dict[str, list[str]]:
        """Agents, models, resources servers, and environment servers where Gym has them."""
        return {name: list(kinds) for name, kinds in self._entries.items()}

    async def run_rollouts(self, rows: Sequence[Row]) -> AsyncGenerator[RowOutcome]:
        """Run one group; raises `GroupSizeError` for a group that its verifier would wait on for ever."""
        wire = self._running()
        check_group(self._verifiers, route_of(rows[0]), rows)
        call = next(self._numbers)
        outcomes = self._calls[call] = asyncio.Queue()
        left = len(rows)
        try:
            await self._begin_call(wire, call, rows)
            while left:
                message = await outcomes.get()
                if message["op"] != "row":
                    raise GymStackError(_GONE)
                left -= 1
                at: int = message["at"]
                row = rows[at]
                yield row, _outcome(message, row)
        finally:
            if left:
                await self._cancel(call, outcomes)
            del self._calls[call]

    async def health(self) -> None:
        """Raise `GymStackError` naming the server that died, or `ClosedError` unless started. May be called in any
        thread and loop.
        """
        self._running()
        assert self._stack is not None
        await asyncio.to_thread(self._stack.check_health)

    async def stop(self) -> None:
        """End every process of the stack; rows that run fail with `GymStackError`."""
        stack, self._stack = self._stack, None
        if self._wire is not None:
            self._wire.close()
        if stack is not None:
            await stack.stop()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._wire = self._reading = None

    def _running(self) -> Wire:
        if self._stack is None or self._wire is None:
            raise ClosedError("the nemo_gym environment is not started, or was stopped; call start(config) first")
        return self._wire

    async def _begin_call(self, wire: Wire, call: int, rows: Sequence[Row]) -> None:
        if self._reading is None or self._reading.done():
            raise GymStackError(_GONE)
        where = f"the group that begins at row {rows[0].get('_rowidx')} cannot be given to NeMo Gym"
        message = encode({"op": "run", "call": call, "rows": stamped(rows, call)}, where=where)
        try:
            await wire.write(message)
        except ConnectionError:
            raise GymStackError(_GONE) from None

    async def _read(self, wire: Wire) -> None:
        try:
            while (message := await wire.receive()) is not None:
                outcomes = self._calls.get(message["call"])
                if outcomes is not None:
                    outcomes.put_nowait(message)
        finally:
            # However it ends, an unreadable message included: nobody would be told any more.
            for outcomes in self._calls.values():
                outcomes.put_nowait({"op": "gone"})

    async def _cancel(self, call: int, outcomes: asyncio.Queue[Message]) -> None:
        """Have what is left of a call cancelled, and wait for the host to say that it is over."""
        if self._wire is None or self._reading is None or self._reading.done():
            return
        try:
            async with asyncio.timeout(_END_PATIENCE_S):
                await self._wire.send({"op": "cancel", "call": call})
                while (await outcomes.get())["op"] == "row":
                    pass
        except TimeoutError:
            log.error("the Gym host did not end call %s within %.0f s", call, _END_PATIENCE_S)
        except ConnectionError:
            pass


def _outcome(message: Message, row: Row) -> dict[str, Any] | Exception:
    if "error" in message:
        return unpack_error(message["error"])
    return restore(message["result"], row)


def _start_error(packed: dict[str, Any]) -> Exception:
    message: str = packed["message"]
    if message.startswith("GroupSizeError: "):
        return ConfigError(message.removeprefix("GroupSizeError: "))
    error = GymStartError(f"NeMo Gym did not start: {message}")
    error.add_note(packed["trace"])
    return error


def _output_file(log_dir: object) -> Path | None:
    return Path(str(log_dir)) / "stack.log" if log_dir else None


def _address_of_running_ray() -> str | None:
    """The cluster this process belongs to, so that Gym joins it; Ray is not imported for the question."""
    ray: Any = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else None
