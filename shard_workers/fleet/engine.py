"""The fleet's inner life, in one event loop: start all or nothing, publish, scale, drain, shut down.

Changes come one at a time. A label belongs to an instance for its life; what is added gets a free one. A place in the
plan's own placement group outlives the instance in it and is used again; a place that was made for one added instance
goes with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ray.util.placement_group import PlacementGroup

from ...broker.channel import Link
from ...broker.errors import ConfigError, FleetError, RolloutBusError
from ...broker.fleet_requests import DONE, Request, last_instance, no_instance
from ...broker.fleet_transitions import FleetTransitions, Published
from ...broker.keys import ANY_ROUTE, Keys
from ...broker.scripts import load_scripts
from ...broker.shard_records import ShardRecord
from ..fleet_config import FleetConfig
from ..plan_errors import ShardSetupError
from ..plan_spec import ShardSpec
from ..routes import build_route_shard_map
from .instances import Instance, InstanceTroubleError, Launcher, State
from .lease import FleetLease, quietly
from .placement import RELEASED_WITHIN_S, Bundle, node_of, place, release
from .supervision import Callbacks, Supervisor

log = logging.getLogger("rolloutbus.fleet")


class FleetEngine:
    """One fleet; all methods run in the loop that made it. `on_end(reason)` is called when it ended without being
    asked.
    """

    def __init__(
        self,
        config: FleetConfig,
        base_urls: Any,
        model_name: str | None,
        on_end: Callable[[str], None],
        *,
        on_local_ray: bool = False,
    ) -> None:
        self.config = config
        self.instances: list[Instance] = []
        self.routes: dict[str, str] = {}
        self._on_end = on_end
        self._on_local_ray = on_local_ray
        self._launcher = Launcher(config, base_urls, model_name)
        self._link = Link(config.broker, "fleet", load_scripts)
        holder = f"{socket.gethostname()}, process {os.getpid()}"
        self._transitions = FleetTransitions(self._link, Keys(config.run), config.broker, holder)
        self._shards = [shard.name for shard in config.plan.shards]
        self._lease = FleetLease(self._link, self._transitions, self._shards, self._on_request, self._on_lost)
        self._supervisor = Supervisor(config, self._launcher, Callbacks(self._free_groups, self._give_up, self._note))
        self._group: PlacementGroup | None = None
        self._spare: list[Bundle] = []
        self._entries: dict[str, dict[str, list[str]]] = {}
        self._lost: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self._change: asyncio.Task[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False

    # Start

    async def start(self, *, replace: bool) -> None:
        """Everything up and published, or nothing left; raises `ShardSetupError` or `FleetError`."""
        try:
            if not replace:
                await self._lease.claim()
            await self._place()
            await self._start_stacks(self.instances)
            self.routes = await self._read_routes()
            await self._lease.publish(self._published(), replace=replace)
            for instance in self.instances:
                await self._begin(instance)
        except BaseException as error:
            await self._abandon()
            if isinstance(error, InstanceTroubleError):
                raise _not_started(error) from None
            raise

    async def _place(self) -> None:
        plan, config = self.config.plan, self.config
        wanted = [(shard, slot) for shard in plan.shards for slot in range(shard.replicas)]
        cpus = [config.actor_cpus(shard) for shard, _ in wanted]
        self._group = await place(cpus, plan.placement_strategy, config.fleet.placement_timeout_s)
        for index, (shard, slot) in enumerate(wanted):
            alone = shard.replicas == 1
            self.instances.append(self._instance(shard, slot, alone, Bundle(self._group, index, cpus[index])))

    def _instance(self, shard: ShardSpec, slot: int, alone: bool, bundle: Bundle) -> Instance:
        label = shard.name if alone else f"{shard.name}/{slot}"
        ports = self.config.port_range(shard, slot)
        return Instance(shard, label, slot, None if alone else slot, bundle, ports)

    async def _start_stacks(self, instances: Sequence[Instance]) -> None:
        """Side by side; the first that fails ends the wait for the others."""
        tasks = [asyncio.create_task(self._launcher.start(instance)) for instance in instances]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_routes(self) -> dict[str, str]:
        for shard in self._shards:
            first = next(instance for instance in self.instances if instance.shard.name == shard)
            self._entries[shard] = await self._launcher.list_entries(first)
        routes = build_route_shard_map(self._entries, self.config.plan.allowed_duplicate_entries)
        return routes if self.config.sharded else {ANY_ROUTE: self._shards[0]}

    async def _begin(self, instance: Instance) -> None:
        await self._launcher.begin(instance)
        instance.state = State.RUNNING
        self._supervisor.watch(instance)

    async def _abandon(self) -> None:
        """A start that failed leaves nothing."""
        self._over = True
        await self._end_instances(self.instances, drain=False)
        await self._release_all()
        await self._leave_broker()

    # What is published

    def _published(self) -> Published:
        return Published(self.routes, {shard: self._record(shard) for shard in self._shards})

    def _record(self, shard: str) -> ShardRecord:
        settings = self.config.workers[shard]
        labels = self.labels(shard)
        return ShardRecord(
            replicas=len(labels), slots=settings.slots, commit=settings.commit, rerun=settings.rerun,
            group_timeout_s=settings.group_timeout_s, entries=self._entries[shard], labels=labels,
            lost=self._lost.get(shard, ""),
        )  # fmt: skip

    def of_shard(self, shard: str) -> list[Instance]:
        """The shard's instances in the order of their slots, those that were given up included."""
        return sorted((i for i in self.instances if i.shard.name == shard), key=lambda i: i.slot)

    def labels(self, shard: str) -> list[str]:
        """Labels of the shard's instances that run, or will again."""
        return [instance.label for instance in self.of_shard(shard) if instance.state is not State.LOST]

    # What the supervisor needs

    async def _free_groups(self, instance: Instance) -> int:
        who = instance.identity
        if who is None:
            return 0
        return await self._transitions.bury(instance.shard.name, instance.label, who.consumer, who.incarnation)

    async def _note(self, kind: str, instance: Instance, detail: str) -> None:
        await self._quietly(self._transitions.note(kind, instance.label, detail))

    async def _give_up(self, instance: Instance, reason: str) -> None:
        shard = instance.shard.name
        if all(other.state is State.LOST for other in self.of_shard(shard)):
            self._lost[shard] = reason
            log.error("shard %s has no instance left; batches that wait for it end with an error", shard)
        await self._lease.publish_loss(self._published(), instance.name)

    # Changes while it runs

    async def scale(self, name: str, replicas: int) -> None:
        """Make `replicas` instances of the shard; those that go are drained first. Raises `FleetError`, and then
        nothing was added.
        """
        shard = self.config.shard(name)
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"shard {name!r} cannot have {replicas!r} replicas; give 1 or more, or shut the fleet down"
            )
        async with self._one_change():
            # An instance that was given up makes room for one that is started afresh.
            await self._remove([i for i in self.of_shard(name) if i.state is State.LOST])
            now = self.of_shard(name)
            if replicas > len(now):
                await self._add(shard, replicas - len(now))
            elif replicas < len(now):
                await self._remove(sorted(now, key=lambda i: (i.state is not State.RUNNING, i.slot))[replicas:])

    async def drain(self, label: str) -> None:
        """End one instance without losing a group; refused for the last one of its shard."""
        meant = self._labelled(label)
        async with self._one_change():
            if meant is not None and meant not in self.instances:
                # Somebody else's change ended it; what has its label now is another one.
                return
            instance = self._labelled(label)
            if instance is None:
                raise FleetError(no_instance(label, [i.label for i in self.instances]))
            if not [i for i in self.of_shard(instance.shard.name) if i is not instance and i.state is not State.LOST]:
                raise FleetError(last_instance(label, instance.shard.name))
            await self._remove([instance])

    def _labelled(self, label: str) -> Instance | None:
        return next((instance for instance in self.instances if instance.label == label), None)

    @asynccontextmanager
    async def _one_change(self) -> AsyncGenerator[None]:
        """One after another. Whoever asked for what the fleet's end breaks off was not cancelled, and is told so."""
        try:
            async with self._changing:
                self._change = asyncio.current_task()
                if self._over:
                    raise shut_down(self.config.run)
                yield
        except asyncio.CancelledError:
            if not self._over:
                raise
            raise shut_down(self.config.run) from None

    async def _add(self, shard: ShardSpec, count: int) -> None:
        added: list[Instance] = []
        try:
            for _ in range(count):
                added.append(await self._find_place(shard, added))
            await self._start_stacks(added)
            for instance in added:
                await self._begin(instance)
        except BaseException as error:
            await self._take_back(added)
            if isinstance(error, InstanceTroubleError):
                raise _not_started(error) from None
            raise
        self.instances += added
        self._lost.pop(shard.name, None)
        await self._lease.publish(self._published())

    async def _take_back(self, added: Sequence[Instance]) -> None:
        """None of them stays; those that run already hand back what they have."""
        await self._watch_no_more(added)
        await self._end_instances([i for i in added if i.state is State.RUNNING], drain=False)
        await self._discard(added)

    async def _find_place(self, shard: ShardSpec, added: Sequence[Instance]) -> Instance:
        """A free slot with ports of its own, and a place for it: a spare one, or one made for it."""
        others = [*self.instances, *added]
        if self._on_local_ray and (why := self.config.hopeless_with(len(others) + 1)) is not None:
            raise ShardSetupError(why)
        taken = {i.slot for i in others if i.shard.name == shard.name}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self.config.port_range(shard, slot)
        cpus = self.config.actor_cpus(shard)
        occupied = [node for i in others if (node := node_of(i.bundle))] if self.config.one_node_each else []
        # One whose node is lost is nowhere, or where Ray could move it.
        usable = (at for at in self._spare if at.cpus == cpus and node_of(at) not in ("", *occupied))
        if (spare := next(usable, None)) is not None:
            self._spare.remove(spare)
            return self._instance(shard, slot, alone=False, bundle=spare)
        # Nobody adds anything to a local Ray; what was given back a moment ago is there again within this time.
        patience_s = self.config.fleet.placement_timeout_s
        patience_s = min(patience_s, RELEASED_WITHIN_S) if self._on_local_ray else patience_s
        group = await place([cpus], "PACK", patience_s, occupied)
        return self._instance(shard, slot, alone=False, bundle=Bundle(group, 0, cpus, stands_alone=True))

    async def _remove(self, leaving: Sequence[Instance]) -> None:
        if not leaving:
            return
        problems = await self._end_instances(leaving, drain=True)
        await self._discard(leaving)
        await self._lease.publish(self._published())
        for problem in problems:
            log.warning("%s; it was killed, and its groups go to others", problem)

    async def _discard(self, leaving: Iterable[Instance]) -> None:
        """Their processes and places go."""
        for instance in leaving:
            await self._launcher.kill(instance)
            if instance in self.instances:
                self.instances.remove(instance)
            if instance.bundle.stands_alone:
                await release(instance.bundle.group)
            else:
                self._spare.append(instance.bundle)

    # What is asked over the broker

    def _on_request(self, request: Request) -> None:
        self._background(self._carry_out(request))

    async def _carry_out(self, request: Request) -> None:
        try:
            if request.verb == "scale":
                await self.scale(request.target, request.replicas)
            elif request.verb == "drain":
                await self.drain(request.target)
            else:
                raise FleetError(f"this fleet does not know the request {request.subject!r}")
            outcome = DONE
        except RolloutBusError as error:
            outcome = str(error)
            log.warning("refused %s: %s", request.subject, error)
        except Exception as error:
            # Whoever asked would wait for half an hour.
            outcome = f"{type(error).__name__}: {error}"
            log.exception("could not carry out %s", request.subject)
        await self._transitions.answer(request, outcome)

    def _on_lost(self, holder: str) -> None:
        log.error("run %s has another fleet now (%s); this one ends", self.config.run, holder)
        self._background(self._end_superseded(holder))

    async def _end_superseded(self, holder: str) -> None:
        await self.shutdown(drain=False)
        self._on_end(f"another fleet has run {self.config.run!r} now: {holder}")

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the fleet could not finish what it was doing: %s", error)

    # The end

    async def shutdown(self, *, drain: bool = True) -> list[str]:
        """Drain and stop every instance, give back all places and keys; what would not stop, by name. Safe twice."""
        self._over = True
        # Starting what is about to be stopped may take half an hour.
        if self._change is not None and self._changing.locked():
            self._change.cancel()
        async with self._changing:
            problems = await self._end_instances(self.instances, drain=drain)
            await self._release_all()
            await self._leave_broker()
            self.instances = []
            return problems

    async def _end_instances(self, instances: Sequence[Instance], *, drain: bool) -> list[str]:
        # All before the first one ends, which would look like a death.
        await self._watch_no_more(instances)
        ends = [self._end(instance, drain=drain and instance.state is State.RUNNING) for instance in instances]
        return [problem for problem in await asyncio.gather(*ends) if problem]

    async def _watch_no_more(self, instances: Sequence[Instance]) -> None:
        for instance in instances:
            await self._supervisor.leave(instance)

    async def _end(self, instance: Instance, *, drain: bool) -> str:
        """Drain where asked, stop, and kill what does neither; says what would not. A dead process is no problem."""
        # Whoever watched over one that died was sent away, maybe before its groups were free.
        died = instance.state is State.RESTARTING
        instance.state, troubles = State.DRAINING, list[InstanceTroubleError]()
        try:
            if drain:
                await self._launcher.drain(instance, self.config.workers[instance.shard.name].drain_timeout_s)
        except InstanceTroubleError as error:
            troubles.append(error)
        try:
            await self._launcher.stop(instance)
        except InstanceTroubleError as error:
            troubles.append(error)
        if troubles or died:
            await self._quietly(self._free_groups(instance))
        instance.state = State.STOPPED
        return next((str(error) for error in troubles if not error.dead), "")

    async def kill(self) -> list[str]:
        """The end without a word to anybody: processes, places and keys go at once; the names of those that ran."""
        self._over = True
        running = [i.name for i in self.instances if i.state not in (State.STOPPED, State.LOST)]
        await self._watch_no_more(self.instances)
        await asyncio.gather(*(self._launcher.kill(instance) for instance in self.instances))
        # Side by side: each may wait for the broker as long as an end may take.
        await asyncio.gather(*(self._quietly(self._free_groups(instance)) for instance in self.instances))
        await self._release_all()
        await self._leave_broker()
        self.instances = []
        return running

    async def _release_all(self) -> None:
        groups = [i.bundle.group for i in self.instances if i.bundle.stands_alone]
        if self._group is not None:
            groups.append(self._group)
        for group in groups:
            try:
                await release(group)
            except Exception as error:
                log.warning("cannot give a placement group back: %s", error)
        self._group = None
        self._spare.clear()

    async def _leave_broker(self) -> None:
        labels = [instance.label for instance in self.instances]
        await self._quietly(self._lease.give_up(labels))
        await self._lease.stop()
        await self._link.close()

    async def _quietly(self, work: Awaitable[object]) -> None:
        await quietly(self._link, self.config.fleet.stop_timeout_s, self.config.run, work)


def shut_down(run: str) -> FleetError:
    return FleetError(f"the fleet of run {run!r} is shut down; start it again")


def _not_started(error: InstanceTroubleError) -> ShardSetupError:
    trace = f"\n{error.trace.rstrip()}" if error.trace else ""
    return ShardSetupError(f"{error}; nothing is left running{trace}")
