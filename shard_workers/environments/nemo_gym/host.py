"""The process that runs Gym: starts the stack, runs rows in one event loop for as long as it lives, answers for its
health.

Started by the supervisor with two connections to the worker: rows and results, and health, which has a thread of its
own because a busy event loop is not an ill one. It promises one outcome per row, and that a cancelled call has no
task left when it says so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from .errors import GymRolloutError, GymStackError, pack_error, sendable_text
from .settings import GymSettings, check_start
from .supervisor import adopt_orphans, die_with_parent, end_descendants
from .versions import Gym
from .wire import Receiver, Wire, encode

log = logging.getLogger("rolloutbus.nemo_gym")

_WATCH_EVERY_S = 1.0


class Host:
    """Runs calls; each row of a call is a task."""

    def __init__(self, gym: Gym, wire: Wire, settings: GymSettings) -> None:
        self._gym = gym
        self._wire = wire
        self._settings = settings
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Work until the worker is gone."""
        watch = asyncio.create_task(self._watch())
        while (message := await self._wire.receive()) is not None:
            call: int = message["call"]
            if message["op"] == "run":
                self._calls[call] = asyncio.create_task(self._run(call, message["rows"]))
                # Its cancellation may be read already, and a task cancelled before its first step says nothing.
                await asyncio.sleep(0)
            elif call in self._calls:
                self._calls[call].cancel()
            else:
                # Over already, or it never came; whoever cancels waits for this.
                await self._wire.send({"op": "ended", "call": call})
        watch.cancel()
        for task in self._calls.values():
            task.cancel()
        await asyncio.gather(watch, *self._calls.values(), return_exceptions=True)

    async def _run(self, call: int, rows: list[dict[str, Any]]) -> None:
        try:
            # However it is left, no row goes on without it.
            async with asyncio.TaskGroup() as tasks:
                for at, row in enumerate(rows):
                    tasks.create_task(self._row(call, at, row))
        finally:
            del self._calls[call]
            await self._wire.send({"op": "ended", "call": call})

    async def _row(self, call: int, at: int, row: dict[str, Any]) -> None:
        head = {"op": "row", "call": call, "at": at}
        try:
            # Here, because what cannot travel is a failure of this row alone.
            outcome = encode({**head, "result": await self._bounded(row)}, where=f"row {row.get('_rowidx')}")
        except Exception as error:
            outcome = encode({**head, "error": pack_error(error)})
        await self._wire.write(outcome)

    async def _bounded(self, row: dict[str, Any]) -> dict[str, Any]:
        limit = self._settings.row_timeout_s
        deadline = asyncio.timeout(limit)
        try:
            async with deadline:
                return await self._unless_broken(row)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"row {row.get('_rowidx')} had no answer after {limit:g} s; look at the model and the environment's "
                "servers, or raise rolloutbus_row_timeout_s"
            ) from None

    async def _unless_broken(self, row: dict[str, Any]) -> dict[str, Any]:
        """Gym's client tries a dead server again for ever; here its death ends the row."""
        rollout = asyncio.create_task(self._gym.rollout(self._gym.addressed(row)))
        try:
            await asyncio.wait({rollout, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if rollout.cancelled():
                raise GymRolloutError(f"NeMo Gym cancelled the rollout of row {row.get('_rowidx')} itself")
            if rollout.done():
                return rollout.result()
            raise GymStackError(self._broken.result())
        finally:
            rollout.cancel()
            await asyncio.gather(rollout, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                await asyncio.to_thread(self._gym.poll)
            except Exception as error:
                self._broken.set_result(str(error))
                return


def answer_health(gym: Gym, connection: socket.socket) -> None:
    """Answer each question, a byte that numbers it, with what is wrong, or nothing; ends when the worker is gone."""
    while question := connection.recv(1):
        trouble = ""
        try:
            gym.poll()
        except Exception as error:
            trouble = sendable_text(error)
        connection.sendall(encode({"question": question[0], "trouble": trouble}))


async def _serve(gym: Gym, connection: socket.socket, settings: GymSettings) -> None:
    asyncio.get_running_loop().set_task_factory(gym.make_task)
    wire = await Wire.over(connection)
    try:
        await Host(gym, wire, settings).serve()
    finally:
        await gym.close()


def _start(connection: socket.socket, folder: Path) -> tuple[Gym, GymSettings] | None:
    """Start as the worker's first message says, and tell it how that went."""
    order = Receiver(connection).receive()
    settings = GymSettings.model_validate(order["settings"])
    try:
        gym = Gym(order["config"], one_venv=settings.one_venv, folder=folder)
        gym.read()
        verifiers = gym.verifiers()
        check_start(verifiers, settings.num_generations)
        gym.start()
    # Gym leaves with SystemExit where a config is wrong.
    except (Exception, SystemExit) as error:
        connection.sendall(encode({"error": pack_error(error)}))
        return None
    started = {
        "entries": gym.entries(),
        "verifiers": {k: list(v) for k, v in verifiers.items()},
        "version": gym.version,
    }
    connection.sendall(encode(started))
    return gym, settings


def _leave(*_: object) -> None:
    raise SystemExit(0)


def main(arguments: list[str]) -> int:
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGTERM, _leave)
    # Its bars are per call, and a call is one row here.
    os.environ.setdefault("TQDM_DISABLE", "1")
    rows, health = (socket.socket(fileno=int(fd)) for fd in arguments[:2])
    try:
        with tempfile.TemporaryDirectory(prefix="rolloutbus-gym-") as folder:
            started = _start(rows, Path(folder))
            # Ray has set its own handler by now.
            signal.signal(signal.SIGTERM, _leave)
            if started is None:
                return 1
            threading.Thread(target=answer_health, args=(started[0], health), daemon=True).start()
            asyncio.run(_serve(started[0], rows, started[1]))
        return 0
    finally:
        end_descendants(float(arguments[2]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
