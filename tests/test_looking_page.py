"""docs/looking.md names every word that `status`, `explain`, `run` and `batch.metrics` use, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from rolloutbus.broker.group_record import ENDED, WAITING
from rolloutbus.collector import timing
from rolloutbus.trainer.cli import explain_command, run_summary, status_command

TOP = Path(__file__).parents[1]
PAGE = (TOP / "docs" / "looking.md").read_text(encoding="utf-8")
LUA = {path.stem: path.read_text(encoding="utf-8") for path in (TOP / "broker" / "lua").glob("*.lua")}
FLEET_EVENTS = "instance-"


def tables_under(heading: str) -> list[dict[str, list[str]]]:
    """First cell → the others, of each table below a heading."""
    _, found, rest = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    blocks = re.findall(r"^\|.*\n\|---.*\n((?:\|.*\n)+)", rest.partition("\n## ")[0], re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in "\n\n".join(blocks).split("\n")]
    tables: list[dict[str, list[str]]] = [{}]
    for first, *others in rows:
        if first:
            tables[-1][first.strip("| `")] = [cell.strip("| ") for cell in others]
        elif tables[-1]:
            tables.append({})
    return [table for table in tables if table]


def table_under(heading: str) -> dict[str, list[str]]:
    return tables_under(heading)[0]


def sources(folder: str) -> Iterable[str]:
    return (path.read_text(encoding="utf-8") for path in (TOP / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("heading", "columns"),
    [
        ("`rolloutbus status`: shards", status_command.SHARD_COLUMNS),
        (f"`rolloutbus status`: {status_command.LONGEST_TITLE}", status_command.LONGEST_COLUMNS),
        ("`rolloutbus status`: instances", status_command.INSTANCE_COLUMNS),
        ("`rolloutbus status`: batches", status_command.BATCH_COLUMNS),
        ("`rolloutbus explain`: the table", explain_command.COLUMNS),
        ("`rolloutbus run`: routes", run_summary.ROUTE_COLUMNS),
        ("`rolloutbus run`: instances", run_summary.INSTANCE_COLUMNS),
    ],
)
def test_every_column_stands_there_in_order(heading: str, columns: tuple[str, ...]) -> None:
    assert tuple(table_under(heading)) == columns


def test_every_state_of_a_batch_stands_there() -> None:
    states = {state for text in LUA.values() for state in re.findall(r"'HSET', KEYS\[1\], 'state', '(\w+)'", text)}
    assert states == {"open", "sealed", "closed"}
    assert set(table_under("The states of a batch")) == states


def test_every_status_of_a_group_stands_there() -> None:
    listed = re.search(r"^-- status: (.*?)\. `", LUA["prelude"], re.MULTILINE)
    assert listed is not None
    statuses = set(re.sub(r" \(.*?\)", "", listed[1]).split(", "))
    set_anywhere = {
        word
        for text in LUA.values()
        for line in re.findall(r"r\.status(?:, r\.\w+)* = (.*)", text)
        for word in re.findall(r"'([a-z]+)'", line)
    }
    assert {*ENDED, *WAITING, "running"} == statuses
    assert set_anywhere <= statuses
    assert set(table_under("The states of a group")) == statuses


def test_every_kind_of_event_stands_there_with_the_word_that_explain_prints() -> None:
    said = [word for text in LUA.values() for word in re.findall(r"\bnote\([\w.\[\]]+, ([^,]+),", text)]
    kinds = {kind for words in said for kind in re.findall(r"'(\w+)'", words)}
    told, of_instances = tables_under("What happens to a group")
    assert kinds >= {"published", "taken", "accepted", "finished"}
    assert set(told) == kinds
    printed = {kind: explain_command.EVENT_WORDS.get(kind, kind) for kind in kinds - {"foreign"}}
    assert {kind: told[kind][0] for kind in printed} == printed
    noted = {kind for text in sources("shard_workers") for kind in re.findall(rf'"({FLEET_EVENTS}[a-z-]+)"', text)}
    assert set(of_instances) == noted


def test_every_metric_stands_there_with_its_unit_and_how_it_is_rolled_up() -> None:
    """What instances measure, as the trainer makes metrics of it."""
    measured = {
        name
        for text in sources("shard_workers")
        for name in re.findall(r'timing\.(?:going_on|add|spend)\("(\w+)"', text)
    }
    assert measured >= {"queue_wait", "environment", "publish"}
    ledger = timing.TimingLedger()
    for label in ("math/0", "math/1"):
        ledger.note(label, json.dumps({"incarnation": "i", **dict.fromkeys(measured, 1.0), timing.GROUPS: 1}))
        ledger.count_group(label)
    names = {*ledger.metrics("P", 1.0), *(f"P/{name}" for name in timing.COUNTERS)}
    of_instances = {name.removeprefix("P/shard/math/0/") for name in names if name.startswith("P/shard/math/0/")}
    of_the_batch = {re.sub("math/[01]", "{label}", name) for name in names if not name.startswith("P/shard/")}
    of_the_batch -= {f"P/{name}" for name in of_instances}
    told = table_under("`batch.metrics`: times of an instance")
    assert set(told) == of_instances
    also_told = table_under("`batch.metrics`: of the batch")
    assert set(also_told) == {name.replace("P/", "{prefix}/", 1) for name in of_the_batch}
    for name, cells in {**told, **also_told}.items():
        assert len(cells) == 3, name
        assert all(cells), name


def test_what_the_last_line_of_run_counts_stands_there() -> None:
    last = PAGE.partition("The last line balances the books")[2].partition("\n")[0]
    assert set(re.findall(r"`(\w+)`", last)) == set(run_summary.COUNTED)
