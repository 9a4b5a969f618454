"""`acl`: the broker's users, one per role."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from ...broker.errors import ConfigError
from .acl_rules import PASSWORD, ROLES, rule, user_name
from .console import out, print_json, say
from .targets import AsJson

# A config's default. The broker, which would know the runs, may not let anybody in yet.
_DEFAULT_RUN = "default"

RoleName = Annotated[
    str | None,
    typer.Option("--role", metavar="ROLE", help=f"Only this one of: {', '.join(ROLES)}.", show_default=False),
]


def acl(
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="NAME",
            help=f"The run whose keys the users may touch; else {_DEFAULT_RUN!r}.",
            show_default=False,
        ),
    ] = None,
    role: RoleName = None,
    as_json: AsJson = False,
) -> None:
    """Print one ACL SETUSER command per role, for a run; each role can do its work and nothing else.

    Put a password of its own in the place of PASSWORD in each, and send them with redis-cli. The role's processes then
    use redis://rolloutbus-RUN-ROLE:ITS_PASSWORD@host:6379/0. A RolloutClient is a `trainer`; producer and collector are
    for those who split it; a fleet's URL serves its workers too.

    Example: rolloutbus acl --run exp1 --role observer
    """
    if role is not None and role not in ROLES:
        raise ConfigError(f"--role {role!r} is not known; say one of {', '.join(ROLES)}")
    if run is None:
        run = _DEFAULT_RUN
        say(f"these are users of the run {run!r}, that of a config without `rolloutbus.run`; --run names another")
    wanted = list(ROLES) if role is None else [role]
    if as_json:
        print_json({name: {"user": user_name(run, name), "command": rule(run, name)} for name in wanted})
        return
    for name in wanted:
        say(textwrap.fill(f"# {name}: {ROLES[name].what}", 78, subsequent_indent="#   "), "dim")
        out.print(" ".join(rule(run, name)), soft_wrap=True)
    say(f"# each {PASSWORD} is to be replaced; --json gives the words one by one", "dim")
