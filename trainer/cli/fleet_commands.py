"""`up`, `scale` and `drain`: a fleet in the foreground, and changing one that runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from omegaconf import DictConfig

from ...broker.channel import Link
from ...broker.embedded import EmbeddedBroker
from ...broker.errors import FleetError
from ...broker.fleet_requests import Request, request_change
from ...broker.fleet_transitions import require_free
from ...broker.keys import Keys
from ...broker.settings import redacted
from ...broker.wording import counted
from .config import ConfigPath, ConfiguredRun, Overrides, configured_url, load_config, with_address, with_target
from .console import out, print_json, say
from .environment_check import check_before_start
from .interrupts import Interrupts
from .own_broker import batches_end_with_it
from .targets import AsJson, BrokerUrl, RunName, observer_settings, on_broker, on_run

if TYPE_CHECKING:
    from ...shard_workers.fleet import ShardFleet

Address = Annotated[
    str | None,
    typer.Option(
        "--address", metavar="A", help="Join this Ray cluster instead of starting a local Ray.", show_default=False
    ),
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Take the run from a fleet that has it, once this one is up.", show_default=False),
]


@contextmanager
def broker_of(url: str | None) -> Generator[str]:
    """The broker at `url`, or an embedded one that ends with the command.

    One that cannot be used is told at once: a fleet would wait for it as for one that restarts.
    """
    if url is not None:
        on_broker(url, _nothing)
        say(f"broker: {redacted(url)}")
        yield url
        return
    with EmbeddedBroker() as server:
        say("broker: an embedded one, which ends with this command")
        yield server.url


# As `timeout`, systemd and batch schedulers send it.
_RAY_IS_GONE = (
    "the signal went to Ray too, and it has ended: nothing was drained. What ran is run by other instances, once its "
    "lease is over"
)


@contextmanager
def running_fleet(
    config: DictConfig, interrupts: Interrupts, *, replace: bool = False, drain: bool = True
) -> Generator[ShardFleet]:
    """A fleet that is drained and stopped at the end, however it comes; without `drain` an interrupt ends it soon."""
    # Ray takes seconds to import, and a wrong config should be told at once.
    from ...shard_workers.fleet import ShardFleet
    from ...shard_workers.fleet.placement import RaySession
    from ...shard_workers.fleet_config import read_fleet_config

    known = read_fleet_config(config)
    if not replace:
        # Starting Ray takes seconds, and only then would the claim say so.
        on_broker(known.broker.url, lambda link: require_free(link, Keys(known.run), known.broker))
    shards = ", ".join(f"{shard.name} ×{shard.replicas}" for shard in known.plan.shards)
    say(f"fleet: starting {counted(known.plan.total_instances, 'instance')} ({shards})")
    # An exception in the middle of Ray's own start ends the process with a segmentation fault.
    with ExitStack() as stack:
        with interrupts.held():
            session = RaySession(known)
            stack.callback(session.close)
        stack.enter_context(interrupts.needing(lambda: session.is_gone, _RAY_IS_GONE))
        fleet = stack.enter_context(ShardFleet.start(known, replace=replace))
        if not drain:
            stack.push(_ending_soon(fleet))
        say(f"fleet: up, routes {', '.join(sorted(fleet.route_map))}")
        yield fleet


def _ending_soon(fleet: ShardFleet) -> Callable[..., None]:
    """For an exit stack: after an interrupt nobody wants what still runs, and whoever does not stop soon is killed."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            grace_s = max(workers.cancel_grace_s for workers in fleet.config.workers.values())
            try:
                fleet.shutdown(drain=False, kill_after_s=grace_s)
            except FleetError as trouble:
                # Told, but the command ends as whoever interrupted it expects.
                say(str(trouble), "red")

    return leave


def up(
    config: ConfigPath,
    overrides: Overrides = None,
    address: Address = None,
    replace: Replace = False,
    broker_url: BrokerUrl = None,
    run: ConfiguredRun = None,
) -> None:
    """Keep the fleet of a config running until Ctrl-C or SIGTERM; then drain and stop it. A second signal stops at
    once.

    Trainers need the broker's URL and the run's name, and nothing of Ray. Without a broker in --broker-url, REDIS_URL
    or the config one is started that ends with the command, and its URL is printed.

    Example: rolloutbus up --config exp.yaml --run exp1 rolloutbus.workers.slots=32
    """
    from ...shard_workers.fleet_config import read_fleet_config

    root = with_address(load_config(config, overrides), address)
    url = configured_url(root, broker_url)
    known = read_fleet_config(with_target(root, url, run))
    check_before_start(known)
    with (
        Interrupts("draining; once more to stop at once") as interrupts,
        broker_of(url) as used,
        batches_end_with_it(used, known.run) if url is None else nullcontext(),
        running_fleet(with_target(root, used, run), interrupts, replace=replace) as fleet,
    ):
        if url is None:
            out.print(f"run {fleet.run} is up; trainers find its broker by")
            out.print(f'export REDIS_URL="{used}"', soft_wrap=True)
        else:
            out.print(f"run {fleet.run} is up; trainers use this broker and --run {fleet.run}", soft_wrap=True)
        out.file.flush()
        interrupts.wait(lambda: _look_at(fleet))


def _look_at(fleet: ShardFleet) -> None:
    reason = fleet.wait(0)
    if reason is not None:
        raise FleetError(f"the fleet of run {fleet.run!r} ended: {reason}")


def _ask(broker_url: str | None, run: str | None, request: Request) -> str:
    """Ask the run's fleet and wait until it has done it; the run's name."""
    name = on_run(broker_url, run, _found)
    request_change(observer_settings(broker_url), name, request, asked=_say_asked, waiting=say)
    return name


def _say_asked() -> None:
    say("asked the fleet, which does one thing after the other; Ctrl-C ends the waiting, not the doing")


async def _found(link: Link, keys: Keys) -> str:
    return keys.run


async def _nothing(link: Link) -> None: ...


def scale(
    shard: Annotated[str, typer.Argument(metavar="SHARD", help="The shard's name.")],
    replicas: Annotated[int, typer.Argument(metavar="N", help="How many instances it is to have.", min=1)],
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Ask the running fleet for N instances of a shard, and wait until they are there; no group is lost.

    Example: rolloutbus scale math 4 --run exp1
    """
    name = _ask(broker_url, run, Request.to_scale(shard, replicas))
    if as_json:
        print_json({"run": name, "shard": shard, "replicas": replicas})
    else:
        out.print(f"shard {shard} of run {name}: {counted(replicas, 'instance')}")


def drain(
    label: Annotated[str, typer.Argument(metavar="LABEL", help="The instance, such as math/1.")],
    broker_url: BrokerUrl = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Ask the running fleet to stop one instance: its groups finish or go to the others. Waits until it is gone.

    Example: rolloutbus drain math/1 --run exp1
    """
    name = _ask(broker_url, run, Request.to_drain(label))
    if as_json:
        print_json({"run": name, "drained": label})
    else:
        out.print(f"instance {label} of run {name} is drained and gone")
