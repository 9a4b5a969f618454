"""What foreign code raises to end its process ends its group here, and nothing else.

asyncio lets `SystemExit` and `KeyboardInterrupt` out of a task through the event loop, and with it would go every other
group. They are turned into ordinary errors where they come by. An environment's own tasks are not ours to wrap: the
loop of a fleet's instance goes on after such an exit, a plain `asyncio.run` around a worker ends.
"""

from __future__ import annotations

import threading

from ...broker.errors import EnvironmentContractError

EXITS = (SystemExit, KeyboardInterrupt)


def contained(error: BaseException, who: str) -> EnvironmentContractError:
    """What to raise in place of one of `EXITS` that `who` raised; raises `error` itself where it may be somebody's
    Ctrl-C, which Python tells to the main thread only.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    return EnvironmentContractError(f"{who} raised {type(error).__name__}({text_of(error)}); let it raise an error")


def text_of(error: object) -> str:
    """The exception's message, whatever its `__str__` does: an environment's exception is an environment's code."""
    try:
        return str(error)
    except (Exception, *EXITS) as broken:
        return f"(its message cannot be read: {type(broken).__name__})"
