"""Who owns each inherited entry.

Promises: every entry of the inventory ends up with exactly one owner, which is one shard or, for a common
entry, all of them; a claim that is unknown or doubled and an entry nobody claimed are refused, with the whole
inventory printed. A single shard owns whatever is not common, because there is nobody else it could belong
to.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..broker.wording import did_you_mean
from .gym_config import GymConfig
from .plan_models import PlanSettings
from .plan_spec import NEMO_RL_DICT_CONFIG_KEYS, SHARDING_CONFIG_KEYS
from .plan_text import key_path, names, raise_problems

_COMMON = "common_inherited_overlays"


def entries_by_owner(config: GymConfig, settings: PlanSettings) -> list[frozenset[str]]:
    """What each shard, in the order of the config, owns alone; raises `ShardConfigError`."""
    inventory = config.entries()
    owners = _claims(settings)
    problems = _unknown_claims(config, inventory, settings) + _double_claims(owners)
    # Claims are checked for a lone shard too, so that adding a second one brings no surprise.
    if len(settings.shards) == 1:
        shard = settings.shards[0]
        raise_problems(problems)
        return [frozenset(inventory).difference(settings.common_inherited_overlays).union(shard.inherited_overlays)]
    raise_problems(problems + _unclaimed(inventory, owners))
    return [frozenset(shard.inherited_overlays) for shard in settings.shards]


def _claims(settings: PlanSettings) -> dict[str, list[str]]:
    """Entry -> the paths of the lists that claim it."""
    owners: dict[str, list[str]] = {}
    for path, shard, keys in _claim_lists(settings):
        for key in keys:
            owners.setdefault(key, []).append(key_path(path, shard))
    return owners


def _claim_lists(settings: PlanSettings) -> Iterable[tuple[str, str | None, list[str]]]:
    yield _COMMON, None, settings.common_inherited_overlays
    for index, shard in enumerate(settings.shards):
        yield f"shards[{index}].inherited_overlays", shard.name, shard.inherited_overlays


def _unknown_claims(config: GymConfig, inventory: list[str], settings: PlanSettings) -> list[str]:
    return [
        f"{key_path(path, shard)} claims {key!r}, {_why_unknown(key, config, inventory)}"
        for path, shard, keys in _claim_lists(settings)
        for key in keys
        if key not in inventory
    ]


def _why_unknown(key: str, config: GymConfig, inventory: list[str]) -> str:
    if key in SHARDING_CONFIG_KEYS or key in NEMO_RL_DICT_CONFIG_KEYS:
        return "which is a setting and no Gym entry; take it off the list"
    if key in config.keys:
        return "whose value is no mapping; only mappings are entries that a shard can own, so take it off the list"
    return (
        f"but {key_path()} has no such entry{did_you_mean(key, inventory)}; the entries there are "
        f"{names(inventory)}. An entry that comes from a shard's config_paths needs no claim: take it off "
        "the list"
    )


def _double_claims(owners: dict[str, list[str]]) -> list[str]:
    return [
        f"{key_path(key)} is claimed twice, by {' and by '.join(paths)}; keep one claim. An entry that all "
        f"shards need belongs in {key_path(_COMMON)} alone"
        for key, paths in owners.items()
        if len(paths) > 1
    ]


def _unclaimed(inventory: list[str], owners: dict[str, list[str]]) -> list[str]:
    orphans = [entry for entry in inventory if entry not in owners]
    if not orphans:
        return []
    # A misspelt sharding key that holds a mapping shows up here, as an entry that nobody claims.
    hints = "".join(
        f"\n    {entry!r} was taken for an entry{hint}"
        for entry in orphans
        if (hint := did_you_mean(entry, SHARDING_CONFIG_KEYS))
    )
    table = "".join(f"\n    {entry}: {' and '.join(owners.get(entry, ['nobody']))}" for entry in inventory)
    return [
        f"{key_path()} has entries that no shard claims: {names(orphans)}. Name each in the "
        f"`inherited_overlays` of one shard, or in {key_path(_COMMON)} if every shard needs it. All entries "
        f"and their owners:{table}{hints}"
    ]
