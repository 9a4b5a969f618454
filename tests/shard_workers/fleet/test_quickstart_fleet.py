"""The quickstart's fleet, in a process of its own that starts Ray itself and ends it again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
import psutil, ray
from omegaconf import OmegaConf
from rolloutbus.shard_workers import ShardFleet
from rolloutbus.trainer import RolloutClient

url = sys.argv[1]
config = OmegaConf.load("examples/quickstart.yaml")
config.rolloutbus.update({"broker": {"url": url}, "run": "quickstart"})
with open("examples/rows.jsonl") as lines:
    rows = [dict(json.loads(line)) for line in lines for _ in range(4)]
with ShardFleet.start(config) as fleet:
    print(json.dumps(dict(fleet.route_map)))
    results = RolloutClient.run_sync(url, rows, 4, run="quickstart")
print(len(rows), sum("reward" in result for result in results), ray.is_initialized())
print([p.name() for p in psutil.Process().children(recursive=True)])
"""
HOPELESS = """
import psutil
from omegaconf import OmegaConf
from rolloutbus.shard_workers import ShardFleet

config = OmegaConf.load("examples/quickstart.yaml")
config.env.nemo_gym.placement_strategy = "STRICT_SPREAD"
try:
    ShardFleet.start(config)
except Exception as error:
    print(type(error).__name__, str(error).split(";")[0], len(psutil.Process().children(recursive=True)))
"""

NO_ROOM = """
import sys, time
from omegaconf import OmegaConf
from rolloutbus.shard_workers import ShardFleet

url, strategy, replicas = sys.argv[1:]
config = OmegaConf.load("examples/quickstart.yaml")
config.rolloutbus.update({"broker": {"url": url}, "run": f"no-room-{strategy}"})
config.env.nemo_gym.placement_strategy = strategy
config.env.nemo_gym.shards = [shard for shard in config.env.nemo_gym.shards if shard.name == "math"]
with ShardFleet.start(config) as fleet:
    begun = time.monotonic()
    try:
        fleet.scale("math", int(replicas))
    except Exception as error:
        print(type(error).__name__, error)
    print(time.monotonic() - begun < 60, fleet.labels)
"""


def said_by(program: str, *words: str, ray_folder: str, home: Path) -> list[str]:
    """The lines that a process of its own printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *words],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "RAY_TMPDIR": ray_folder, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Token authentication" not in done.stderr, "four lines on the terminal that look like a problem"
    return done.stdout.splitlines()


def test_the_quickstart_runs_with_a_ray_of_its_own(valkey: EmbeddedBroker, ray_folder: str, tmp_path: Path) -> None:
    routes, counts, children = said_by(PROGRAM, valkey.url, ray_folder=ray_folder, home=tmp_path)
    assert routes == '{"sort_words": "words", "brevity": "words", "arithmetic": "math"}'
    assert counts == "256 256 False"
    assert children == "[]"


def test_no_ray_is_started_for_a_plan_that_it_could_never_place(ray_folder: str, tmp_path: Path) -> None:
    (said,) = said_by(HOPELESS, ray_folder=ray_folder, home=tmp_path)
    assert said == "ShardSetupError 3 instances under STRICT_SPREAD need 3 nodes, and a local Ray is one 0"


@pytest.mark.parametrize(
    ("strategy", "replicas", "why"),
    [
        ("STRICT_SPREAD", 2, "2 instances under STRICT_SPREAD need 2 nodes, and a local Ray is one"),
        ("PACK", 40, "CPUs are free in all. Add nodes, lower `actor_cpus` or `replicas`, or raise"),
    ],
)
def test_what_a_local_ray_has_no_room_for_is_not_waited_for(
    valkey: EmbeddedBroker, ray_folder: str, tmp_path: Path, strategy: str, replicas: int, why: str
) -> None:
    """It waited for three minutes for a node that nobody could add, without a word."""
    error, after = said_by(NO_ROOM, valkey.url, strategy, str(replicas), ray_folder=ray_folder, home=tmp_path)
    assert error.startswith("ShardSetupError")
    assert why in error
    assert after == "True {'math': ['math']}"
