"""`broker`: an embedded server in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from ...broker.embedded import EmbeddedBroker
from ...broker.errors import ConfigError, EmbeddedBrokerError
from ...broker.server_config import PERSISTENCE_KINDS, SAFE_IN_PASSWORDS
from .console import out, say
from .interrupts import Interrupts

PASSWORD_VARIABLE = "REDIS_PASSWORD"

Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="P",
        min=0,
        max=65535,
        help="Listen on the loopback at this port (0: a free one).",
        show_default=False,
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="D", help="Keep data and log here; else they go with the server.", show_default=False
    ),
]
Kind = Annotated[str, typer.Option("--persistence", metavar="KIND", help=f"One of {', '.join(PERSISTENCE_KINDS)}.")]
Megabytes = Annotated[
    int | None, typer.Option("--maxmemory-mb", metavar="MB", min=16, help="Memory limit.", show_default=False)
]


def broker(
    port: Port = None, directory: Directory = None, persistence: Kind = "none", maxmemory_mb: Megabytes = None
) -> None:
    """Run a broker of your own until Ctrl-C or SIGTERM, for one machine, and print its URL.

    Without --port it listens on a private unix socket that only you can open, and needs no password. With --port every
    user of the machine could connect, so it has one: that of REDIS_PASSWORD (letters, digits and . _ ~ - *), which is
    then not printed, else a new one, which is printed once, as a part of the URL on standard output. It is never on a
    command line. The URL comes as a shell line; anything else goes to standard error.

    Example: rolloutbus broker --port 6390 --dir ./broker --persistence everysec
    """
    if persistence not in PERSISTENCE_KINDS:
        raise ConfigError(f"--persistence {persistence!r} is not known; say one of {', '.join(PERSISTENCE_KINDS)}")
    password = _given_password() if port is not None else None
    server = EmbeddedBroker(
        directory=directory,
        persistence=persistence,
        maxmemory=maxmemory_mb << 20 if maxmemory_mb else None,
        password=password,
        tcp=port is not None,
        port=port or 0,
    )
    with Interrupts("stopping the broker") as interrupts, server:
        shown = server.safe_url.replace("***", f"${PASSWORD_VARIABLE}") if password else server.url
        out.print(f'export REDIS_URL="{shown}"', soft_wrap=True)
        out.file.flush()
        if server.fallback_reason:
            say(server.fallback_reason)
        say(f"running (process {server.pid}); end it with Ctrl-C")
        interrupts.wait(lambda: _look_at(server))


def _given_password() -> str | None:
    """That of the environment. The shell puts it into the printed URL as it is, where `/` or `%41` means another."""
    password = os.environ.get(PASSWORD_VARIABLE) or None
    if password and quote(password, safe=SAFE_IN_PASSWORDS) != password:
        raise ConfigError(
            f"{PASSWORD_VARIABLE} has characters that mean something else in the URL which is printed with it; "
            "letters, digits and . _ ~ - * are fine"
        )
    return password


def _look_at(server: EmbeddedBroker) -> None:
    if server.pid is None:
        raise EmbeddedBrokerError(f"the broker's server ended by itself; its log is {server.log_path}")
