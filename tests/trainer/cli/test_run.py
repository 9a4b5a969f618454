"""`run`, `up` and `broker` as a user starts them: real processes, a local Ray, and nothing of them left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from rolloutbus.broker.errors import BatchCancelledError
from rolloutbus.broker.keys import Keys
from rolloutbus.trainer import RolloutClient

from .conftest import call, comes_true, redis_at

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "rolloutbus.trainer.cli"]
TIME_LIMIT_S = 100.0

FUNCTIONS = """
import asyncio

async def slow(row, context):
    await asyncio.sleep(context.options.get("seconds", 0))
    if row.get("do") == "fail":
        raise ValueError("no number in the answer")
    return {"reward": 0.5, "odd": float("nan")}
"""
CONFIG = """
rolloutbus:
  environment: functions
  workers: {slots: 2, data_attempts: 1}
env:
  nemo_gym:
    policy: offline
    placement_strategy: PACK
    shards:
      - {name: math, config_paths: [math.yaml], actor_cpus: 0.2, port_range_low: 22000, port_range_high: 22200}
"""


class Program:
    """A command in a session of its own, as in a terminal of its own, and every process that it ever had below it."""

    def __init__(self, folder: Path, *words: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        self.process = subprocess.Popen(
            [*COMMAND, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def look(self) -> bool:
        """Note what runs below it now; True, for conditions."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return True

    def has(self, name: str) -> bool:
        """Whether a process of this name was seen below it."""
        names: list[str] = []
        for child in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(child.name())
        return name in names

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to everything in the session's foreground."""
        self.look()
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> tuple[int, str, str]:
        self.look()
        out, err = self.process.communicate(timeout=TIME_LIMIT_S)
        return self.process.returncode, out, err

    def nothing_is_left(self) -> None:
        assert self._seen, "it was never looked at while it ran"
        gone, alive = psutil.wait_procs(list(self._seen.values()), timeout=10)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE], (gone, alive)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a config, its functions, and rows of six prompts, one of which fails."""
    (tmp_path / "own_functions.py").write_text(FUNCTIONS)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "math.yaml").write_text('slow: {function: "own_functions:slow", seconds: 0}\n')
    row: dict[str, Any] = {"responses_create_params": {"input": "1+1?"}, "agent_ref": {"name": "slow"}}
    rows = [{**row, "do": "fail" if prompt == 3 else "ok"} for prompt in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def until(condition: Any) -> None:
    """Longer than elsewhere: a Ray has to start."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def test_the_quickstart_gives_every_row_once_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    words = (
        "--config",
        "examples/quickstart.yaml",
        "--rows",
        "examples/rows.jsonl",
        "--num-generations",
        "8",
        "--out",
        str(out),
    )
    with Program(ROOT, "run", *words, "--json") as program:
        until(lambda: program.look() and (out.exists() or program.process.poll() is not None))
        code, said, progress = program.wait()
        assert code == 0, progress
        program.nothing_is_left()
    lines = results(out)
    assert sorted(line["_rowidx"] for line in lines) == list(range(512))
    assert {line["instance"] for line in lines} == {"math", "words/0", "words/1"}
    assert all(line["attempt"] == 1 and 0 <= line["reward"] <= 1 and line["result"] for line in lines)
    summary = json.loads(said)
    assert (summary["groups"], summary["completed"], summary["failed"], summary["cancelled"]) == (64, 64, 0, 0)
    assert {route: tally["rows"] for route, tally in summary["routes"].items()} == {
        "arithmetic": 176, "brevity": 168, "sort_words": 168,
    }  # fmt: skip
    assert sum(instance["groups"] for instance in summary["instances"].values()) == 64
    assert "math 22/22, words 42/42" in progress


def test_a_failed_group_gives_code_1_and_lines_that_say_why(folder: Path) -> None:
    with Program(folder, "run", "-c", "c.yaml", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl") as program:
        until(lambda: program.look() and (folder / "o.jsonl").exists())
        code, said, progress = program.wait()
        assert code == 1, progress
        program.nothing_is_left()
    lines = {line["_rowidx"]: line for line in results(folder / "o.jsonl")}
    assert sorted(lines) == list(range(12))
    assert {index for index, line in lines.items() if "failure" in line} == {6, 7}
    assert (lines[6]["reward"], lines[6]["failure"]["type"]) == (None, "ValueError")
    assert lines[0]["result"]["odd"] == "NaN"
    assert "6 groups = 5 completed + 1 failed + 0 cancelled" in said
    assert "ValueError: no number in the answer" in said
    assert "Traceback" not in progress


def test_ctrl_c_in_the_middle_cancels_and_leaves_nothing(folder: Path) -> None:
    (folder / "math.yaml").write_text('slow: {function: "own_functions:slow", seconds: 1}\n')
    with Program(folder, "run", "-c", "c.yaml", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl") as program:
        until(lambda: program.look() and (folder / "o.jsonl").exists() and results(folder / "o.jsonl"))
        program.interrupt()
        code, said, progress = program.wait()
        assert code == 130, progress
        program.nothing_is_left()
    assert 2 <= len(results(folder / "o.jsonl")) < 12
    assert re.search(r"[1-9] cancelled", said)
    assert "Traceback" not in progress


def test_ctrl_c_ends_soon_though_a_rollout_blocks_its_event_loop(folder: Path) -> None:
    (folder / "math.yaml").write_text('slow: {function: "own_functions:blocking"}\n')
    blocking = "import pathlib, time\nasync def blocking(row, context):\n"
    blocking += "    pathlib.Path('blocked').touch()\n    time.sleep(300)\n"
    (folder / "own_functions.py").write_text(blocking)
    with Program(folder, "run", "-c", "c.yaml", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl") as program:
        until(lambda: program.look() and (folder / "blocked").exists())
        program.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        code, _, progress = program.wait()
        assert code == 130, progress
        # The grace of five seconds and the kill; a drain would take thirty, and then as long again for the stop.
        assert time.monotonic() - began < 25
        program.nothing_is_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_ray_starts_gives_its_code_and_leaves_nothing(
    folder: Path, number: signal.Signals, code: int
) -> None:
    with Program(folder, "run", "-c", "c.yaml", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl") as program:
        until(lambda: program.look() and program.has("gcs_server"))
        # A terminal sends Ctrl-C to all, a supervisor SIGTERM to the command.
        program.interrupt() if number is signal.SIGINT else program.process.send_signal(number)
        ended, _, progress = program.wait()
        assert ended == code, progress
        assert "stopping" in progress
        program.nothing_is_left()
    assert not (folder / "o.jsonl").exists()


def test_two_interrupts_end_at_once_and_leave_nothing(folder: Path) -> None:
    (folder / "math.yaml").write_text('slow: {function: "own_functions:stubborn", seconds: 1}\n')
    stubborn = "import time\nasync def stubborn(row, context):\n    time.sleep(8)\n    return {'reward': 0}\n"
    (folder / "own_functions.py").write_text(stubborn)
    with Program(folder, "run", "-c", "c.yaml", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl") as program:
        until(lambda: program.look() and (folder / "o.jsonl").exists())
        program.interrupt()
        assert program.process.stderr is not None
        while "once more to stop at once" not in program.process.stderr.readline():
            assert program.process.poll() is None
        program.interrupt()
        began = time.monotonic()
        assert program.wait()[0] == 130
        assert time.monotonic() - began < 5
        program.nothing_is_left()


def test_up_serves_scales_drains_and_ends_on_sigterm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Program(folder, "broker", "--port", "0", "--dir", "data", "--persistence", "everysec") as broker:
        assert broker.process.stdout is not None
        url = broker.process.stdout.readline().strip().removeprefix('export REDIS_URL="').removesuffix('"')
        broker.look()
        monkeypatch.setenv("REDIS_URL", url)
        with Program(folder, "up", "-c", "c.yaml", "--run", "exp7", "--broker-url", url) as fleet:
            assert fleet.process.stdout is not None
            ready = fleet.process.stdout.readline()
            assert "run exp7 is up; trainers use this broker and --run exp7" in ready, fleet.wait()
            assert url not in ready, "the password is not printed"
            scaled = call("scale", "math", "2")
            assert scaled.out.strip() == "shard math of run exp7: 2 instances"
            assert "asked the fleet" in scaled.said
            shard = call("status", "--run", "exp7", "--json").json["runs"][0]["shards"][0]
            assert len(shard["instances"]) == 2
            assert [line for line in call("doctor").out.splitlines() if line.startswith("wrong")] == []
            label = shard["instances"][1]["label"]
            assert f"instance {label} of run exp7 is drained" in call("drain", label).out
            assert "math" in call("drain", "nobody", code=1).said
            fleet.look()
            # As a supervisor does: to the command, which ends its own processes itself.
            fleet.process.send_signal(signal.SIGTERM)
            code, _, said = fleet.wait()
            assert code == 143, said
            fleet.nothing_is_left()
        with redis_at(url) as client:
            comes_true(lambda: not client.keys("rolloutbus:{exp7}:[!e]*"))
        broker.interrupt()
        assert broker.wait()[0] == 130
        broker.nothing_is_left()
    assert (folder / "data/broker.log").exists()
    assert not list((folder / "data").glob("*.conf"))


def test_a_signal_to_the_whole_process_group_ends_soon_and_says_what_it_cost(folder: Path) -> None:
    """As `timeout` sends it: Ray ended at once, and its client looked for it for a minute."""
    with Program(folder, "up", "-c", "c.yaml") as fleet:
        assert fleet.process.stdout is not None
        assert "is up" in fleet.process.stdout.readline()
        fleet.look()
        os.killpg(fleet.process.pid, signal.SIGTERM)
        began = time.monotonic()
        code, _, said = fleet.wait()
        assert code == 143, said
        # Ray's processes take up to a few seconds to end.
        assert time.monotonic() - began < 30
        fleet.nothing_is_left()


async def test_up_with_its_own_broker_ends_open_batches_before_it(folder: Path) -> None:
    """Their client waited five minutes for the broker, which had ended with the command."""
    (folder / "math.yaml").write_text('slow: {function: "own_functions:slow", seconds: 300}\n')
    with Program(folder, "up", "-c", "c.yaml", "rolloutbus.workers.drain_timeout_s=0.5") as fleet:
        assert fleet.process.stdout is not None
        _, url = fleet.process.stdout.readline(), fleet.process.stdout.readline().split('"')[1]
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        async with RolloutClient.connect(url, run="default") as client, client.run_groups(rows, 1) as batch:
            coming = asyncio.ensure_future(anext(batch))
            with redis_at(url) as broker:
                record = Keys("default").batch(batch.id)
                await asyncio.to_thread(until, lambda: str(broker.hget(record, "g:0")).startswith("running"))
            fleet.interrupt()
            with pytest.raises(BatchCancelledError, match="`rolloutbus up` ended, and its own broker with it"):
                await asyncio.wait_for(coming, TIME_LIMIT_S)
        code, _, said = fleet.wait()
        assert code == 130
        assert "1 open batch cancelled, clients told" in " ".join(said.split())
        fleet.nothing_is_left()


def test_a_given_broker_password_is_neither_printed_nor_in_a_process_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", "topsecret")
    with Program(tmp_path, "broker", "--port", "0") as program:
        assert program.process.stdout is not None
        line = program.process.stdout.readline()
        assert "$REDIS_PASSWORD" in line
        titles = [" ".join(child.cmdline()) for child in psutil.Process(program.process.pid).children(recursive=True)]
        program.interrupt()
        code, out, err = program.wait()
    assert code == 130
    assert titles
    assert "topsecret" not in "\n".join([line, out, err, *titles])
