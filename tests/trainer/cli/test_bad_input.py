"""A user's mistakes: one message that says what, where and what to do, exit code 2, no stack, and nothing started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rolloutbus.broker.embedded import EmbeddedBroker
from rolloutbus.broker.errors import ConfigError
from rolloutbus.broker.handshake import parse_address
from rolloutbus.broker.keys import Keys
from rolloutbus.trainer.cli import broker_command
from rolloutbus.trainer.cli.results_file import check_writable

from .conftest import call, redis_at

GOOD_ROW = '{"responses_create_params": {"input": "1+1?"}, "agent_ref": {"name": "arithmetic"}}'
GOOD_CONFIG = """\
rolloutbus:
  environment: functions
env:
  nemo_gym:
    policy: offline
    arithmetic: {function: "asyncio:sleep"}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    Path("good.yaml").write_text(GOOD_CONFIG)
    Path("rows.jsonl").write_text(GOOD_ROW + "\n")


def run_says(*words: str, config: str = "good.yaml", rows: str = "rows.jsonl", out: str = "o.jsonl") -> str:
    """The message of a `run` that must end with the user's mistake, as one line."""
    said = call("run", "-c", config, "-r", rows, "-n", "2", "-o", out, *words, code=2)
    assert "Traceback" not in said.err
    assert "starting" not in said.err
    return said.said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rolloutbus:\n  brokr: {}\nenv: {nemo_gym: {}}\n", "rolloutbus.brokr is not a known key"),
        ("rolloutbus:\n  workers: {slotz: 3}\nenv: {nemo_gym: {}}\n", "rolloutbus.workers.slotz is not a known key"),
        (
            "rolloutbus:\n  workers: {slot: 3}\nenv: {nemo_gym: {}}\n",
            "workers.slot is not a known key (did you mean 'slots'?)",
        ),
        ("rolloutbus: {environment: functions}\n", "`env.nemo_gym` is missing"),
        ("a: 1\nb: [1\nc: 2\n", "broken.yaml, line 3 is no valid YAML"),
        ("- 1\n- 2\n", "holds a list"),
        ("RolloutBus: {}\nenv: {nemo_gym: {}}\n", "broken.yaml: the key 'RolloutBus' at its top level is not known"),
        ("rollout_bus: {}\nenv: {nemo_gym: {}}\n", "did you mean 'rolloutbus'?"),
        ("rolloutbus: {}\nevn: {nemo_gym: {}}\n", "the key 'evn' at its top level is not known; did you mean 'env'?"),
    ],
)
def test_broken_config_is_named_with_its_place(text: str, expected: str) -> None:
    Path("broken.yaml").write_text(text)
    assert expected in run_says(config="broken.yaml")


def test_missing_config_is_named() -> None:
    assert "there is no config file missing.yaml" in run_says(config="missing.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("slots", "'slots' is not KEY=VALUE"),
        ("=3", "'=3' is not KEY=VALUE"),
        ("rolloutbus.workers.slots=[1", "no valid YAML"),
        ("rolloutbus.workers.slots=many", "rolloutbus.workers.slots"),
        ("rolloutbus.nothing=1", "rolloutbus.nothing is not a known key"),
        ("rolloutbus.environment.deep=1", "rolloutbus.environment"),
        ("workers.slots=3", "did you mean rolloutbus.workers.slots?"),
        ("nemo_gym.policy=offline", "did you mean env.nemo_gym.policy?"),
        ("rolloutbuss.run=x", "did you mean rolloutbus.run?"),
        ("~workers", "did you mean rolloutbus.workers?"),
        ("~grpo", "the config has no 'grpo', and so nothing to blank"),
        ("grpo[0].x=3", "the config has no 'grpo'; write +grpo[0].x=3 if it is to be new"),
    ],
)
def test_bad_override_is_named(override: str, expected: str) -> None:
    assert expected in run_says(override)


@pytest.mark.parametrize(
    "override",
    [
        "redis://:hunter2@h",
        "~redis://:hunter2@h",
        "redis://:hunter2@h?password=x",
        "broker.url=redis://:hunter2@h",
        "nowhere=redis://:hunter2@h",
        "evn.nemo_gym.policy_api_key=hunter2",
        "rolloutbus.broker.url=[redis://:hunter2@h",
        "env.nemo_gym.policy_api_key=${hunter2",
        "env.nemo_gym.shards[0].url=redis://:hunter2@h",
        "rolloutbus.broker=redis://:hunter2@h",
        "rolloutbus.workers.slots={at: redis://:hunter2@h}",
        "rolloutbus=redis://:hunter2@h",
    ],
)
def test_what_is_wrong_with_an_override_shows_no_secret_in_it(override: str) -> None:
    """A misspelt key, or a value that cannot be read, put the broker's password into whatever keeps standard error."""
    said = run_says(override)
    assert "Error: " in said
    assert "hunter2" not in said


def test_a_brokers_url_that_no_config_takes_is_not_shown() -> None:
    said = run_says("--broker-url", "redis://:hunter2${x@h")
    assert "'rolloutbus.broker.url=***' cannot be put into the config" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{GOOD_ROW}\n\n{{broken\n", "rows.jsonl line 3 is no valid JSON"),
        ('{"a": 1\n', "Expecting ',' delimiter at column 8"),
        (f"{GOOD_ROW}\n[1]\n", "rows.jsonl line 2 holds a list"),
        ("", "the batch is empty"),
        ('{"agent_ref": {"name": "a"}}\n', "rows.jsonl line 1 lacks responses_create_params"),
        (f'{GOOD_ROW}\n\n{{"agent_ref": {{"name": "a"}}}}\n', "rows.jsonl line 3 lacks responses_create_params"),
        (f'{GOOD_ROW}\n\n{{"responses_create_params": {{}}}}\n', "rows.jsonl line 3: the row has no route"),
        (f"{GOOD_ROW}\n\n{GOOD_ROW.replace('arithmetic', 'row 9')}", "'row 9' in 1 row, first at rows.jsonl line 3"),
        ('{"responses_create_params": 1, "agent_ref": {"name": "a"}}\n', "must be a dict"),
    ],
)
def test_broken_rows_are_named_with_their_line(text: str, expected: str) -> None:
    Path("rows.jsonl").write_text(text)
    assert expected in run_says()


def test_rows_that_are_no_text_are_named() -> None:
    Path("rows.jsonl").write_bytes(GOOD_ROW.encode() + b"\n\xff\xfe\n")
    assert "rows.jsonl is no UTF-8 text" in run_says()


def test_expanded_rows_must_fill_their_groups() -> None:
    assert "1 rows are no multiple of num_generations=2" in run_says("--expanded")


def test_missing_rows_and_places_for_results_are_named(tmp_path: Path) -> None:
    assert "there is no rows file nothing.jsonl" in run_says(rows="nothing.jsonl")
    assert "is a folder" in run_says(out=str(tmp_path))
    assert "there is no folder" in run_says(out="nowhere/o.jsonl")
    assert not Path("o.jsonl").exists()


@pytest.mark.parametrize(
    "place", ["rows.jsonl", "./rows.jsonl", "link.jsonl", "hard.jsonl", "good.yaml", "entries.yaml"]
)
def test_results_never_overwrite_what_the_job_reads(place: str) -> None:
    Path("entries.yaml").write_text('arithmetic: {function: "asyncio:sleep"}\n')
    Path("link.jsonl").symlink_to("rows.jsonl")
    Path("hard.jsonl").hardlink_to("rows.jsonl")
    before = Path(place).read_text()
    assert "that the job reads" in run_says("env.nemo_gym.config_paths=[entries.yaml]", out=place)
    assert Path(place).read_text() == before


def test_results_never_overwrite_rows_that_come_by_a_redirection(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("rows.jsonl").open() as rows, Path("rows.jsonl").open("a") as results:
        monkeypatch.setattr("sys.stdin", rows)
        with pytest.raises(ConfigError, match="the file - that the job reads"):
            check_writable("rows.jsonl", ["-"])
        monkeypatch.setattr("sys.stdout", results)
        with pytest.raises(ConfigError, match="that the job reads"):
            check_writable("-", ["rows.jsonl"])


def test_a_device_may_be_on_both_sides() -> None:
    check_writable("/dev/null", ["/dev/null"])


def test_rows_from_standard_input_are_named_as_such() -> None:
    said = call("run", "-c", "good.yaml", "-r", "-", "-n", "2", "-o", "o.jsonl", code=2, stdin="{\n")
    assert "standard input line 1 is no valid JSON" in said.said


@pytest.mark.parametrize("command", [("run", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl"), ("up",)])
def test_a_broker_that_is_not_there_is_told_before_anything_starts(command: tuple[str, ...]) -> None:
    said = call(*command, "-c", "good.yaml", "--broker-url", "redis://:secret@127.0.0.1:1/0", code=1).said
    assert "cannot reach the broker at redis://:***@127.0.0.1:1" in said
    assert "starting" not in said


@pytest.mark.parametrize("command", [("run", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl"), ("up",)])
def test_a_run_that_has_a_fleet_is_told_before_anything_starts(
    broker: EmbeddedBroker, command: tuple[str, ...]
) -> None:
    """It was told once Ray had started, and what would replace the other was no option of the command."""
    with redis_at(broker.url) as client:
        client.set(Keys("default").fleet, "abc host-a, process 1")
    said = call(*command, "-c", "good.yaml", "--broker-url", broker.url, code=1).said
    assert "run 'default' has a fleet already (host-a, process 1)" in said
    assert "`rolloutbus up --replace`" in said
    assert "starting" not in said


def test_unknown_choice_is_named() -> None:
    assert "say yield or raise" in run_says("--on-failure", "ignore")


@pytest.mark.parametrize("command", [("check",), ("run", "-r", "rows.jsonl", "-n", "2", "-o", "o.jsonl"), ("up",)])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nope", "say one of actor_class, functions, nemo_gym"),
        (":x", "say one of actor_class, functions, nemo_gym"),
        ("a..b:c", "say one of actor_class, functions, nemo_gym"),
        ("os:nope", "has no attribute 'nope'"),
        ("os:path", "is no class"),
        ("json:JSONDecoder", "lacks start"),
        ("no_such_module:Environment", "there is no module 'no_such_module'"),
    ],
)
def test_an_environment_that_cannot_be_is_named_before_anything_starts(
    command: tuple[str, ...], name: str, expected: str
) -> None:
    said = call(*command, "-c", "good.yaml", f"rolloutbus.environment={name}", code=2)
    assert expected in said.said
    assert "broker:" not in said.err


def test_a_module_that_only_nodes_of_a_cluster_have_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("check", "-c", "good.yaml", "rolloutbus.environment=no_such_module:Environment")
    assert "the nodes of the cluster auto must have it" in call(*words, "rolloutbus.fleet.address=auto").said
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert "the nodes of the cluster head:6379 must have it" in call(*words).said
    assert "has no attribute" in call(*words[:3], "rolloutbus.environment=os:nope", code=2).said


def test_up_names_a_function_that_is_none_before_anything_starts() -> None:
    said = call("up", "-c", "good.yaml", "env.nemo_gym.arithmetic.function=json:loads", code=2)
    assert "no async function" in said.said
    assert "broker:" not in said.err


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_function_that_is_none_is_named_before_anything_starts(command: str) -> None:
    mistake = "env.nemo_gym.arithmetic.function=json:loads"
    said = run_says(mistake) if command == "run" else call("check", "-c", "good.yaml", mistake, code=2).said
    assert "arithmetic.function" in said
    assert "no async function" in said


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_route_that_the_only_shard_does_not_know_is_named_before_anything_starts(command: str) -> None:
    Path("rows.jsonl").write_text(f"{GOOD_ROW}\n{GOOD_ROW.replace('arithmetic', 'chess')}\n")
    said = run_says() if command == "run" else call("check", "-c", "good.yaml", "-r", "rows.jsonl", code=2).said
    assert "'chess' in 1 row, first at rows.jsonl line 2" in said


NO_ROUTE = '{"responses_create_params": {"input": "1+1?"}}'
OTHER_ROUTE = GOOD_ROW.replace("arithmetic", "chess")


@pytest.fixture(params=["any", "unknown"])
def _hosting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """An environment that hosts every route, or that tells only once it runs."""

    def hosted(*_: object) -> dict[str, str] | None:
        return {"*": "nemo_gym"} if request.param == "any" else None

    for command in ("run_command.check_before_start", "check_command.hosted_routes"):
        monkeypatch.setattr(f"rolloutbus.trainer.cli.{command}", hosted)


@pytest.mark.usefixtures("_hosting")
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_row_without_a_route_is_named_before_anything_starts(command: str) -> None:
    """Where it is not known what is hosted, the rows were not looked at before the fleet was up."""
    Path("rows.jsonl").write_text(f"{GOOD_ROW}\n\n{NO_ROUTE}\n")
    said = run_says() if command == "run" else call("check", "-c", "good.yaml", "-r", "rows.jsonl", code=2).said
    assert "rows.jsonl line 3: the row has no route" in said


@pytest.mark.usefixtures("_hosting")
def test_a_group_that_mixes_routes_is_named_before_anything_starts() -> None:
    Path("rows.jsonl").write_text(f"{GOOD_ROW}\n{GOOD_ROW}\n\n{GOOD_ROW}\n{OTHER_ROUTE}\n")
    assert "the group that begins at rows.jsonl line 4 mixes routes: arithmetic, chess" in run_says("--expanded")


def test_check_names_rows_that_nobody_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    rows = '{"responses_create_params": {}, "agent_ref": {"name": "arithmetik"}}\n'
    said = call("check", "-c", "examples/quickstart.yaml", "--rows", "-", stdin=rows, code=2)
    assert "did you mean 'arithmetic'?" in said.said


def test_check_takes_entries_for_what_only_running_stacks_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    entries = tmp_path / "entries.json"
    entries.write_text(json.dumps({"quiz": {"w": ["responses_api_agents"]}, "office": {"m": ["resources_servers"]}}))
    common = ("check", "-c", "examples/nemo_gym/config.yaml")
    plan = call(*common, "--entries", str(entries), "--json").json
    assert {shard["shard"]: shard["routes"] for shard in plan["shards"]} == {"quiz": ["w"], "office": ["m"]}
    assert [shard["routes"] for shard in call(*common, "--json").json["shards"]] == [None, None]
    entries.write_text("{quiz: {}}")
    assert "says nothing of shard 'office'" in call(*common, "--entries", str(entries), code=2).said


def test_gym_that_is_not_here_is_told_before_a_fleet_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` started a broker, Ray and every instance before the first one said so."""
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setattr("importlib.util.find_spec", dict[str, object]().get)
    config = ("-c", "examples/nemo_gym/config.yaml")
    assert "needs NeMo Gym, which is not installed here" in call("up", *config, code=2).said
    said = " ".join(call("check", *config).said.split())
    assert "not checked, the machine that starts it must have it" in said


def test_the_quickstart_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    shown = call("check", "-c", "examples/quickstart.yaml", "--rows", "examples/rows.jsonl").out
    assert "every one of 64 rows" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_one_row_is_told_as_one() -> None:
    assert "and its one row has a shard" in " ".join(call("check", "-c", "good.yaml", "-r", "rows.jsonl").out.split())


SPREAD = ("env.nemo_gym.placement_strategy=STRICT_SPREAD",)


@pytest.mark.parametrize("command", [("up",), ("run", "-r", "examples/rows.jsonl", "-n", "2", "-o", "-")])
def test_a_plan_that_one_machine_can_never_place_is_refused_before_anything_starts(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` said so once Ray had started, and `check` not at all."""
    monkeypatch.chdir(Path(__file__).parents[3])
    answer = call(*command, "-c", "examples/quickstart.yaml", *SPREAD, code=2)
    assert "3 instances under STRICT_SPREAD" in call("check", "-c", "examples/quickstart.yaml", *SPREAD).said
    assert "3 instances under STRICT_SPREAD need 3 nodes, and a local Ray is one; join a cluster" in answer.said
    assert "`env.nemo_gym.placement_strategy: PACK`" in answer.said
    assert "broker" not in answer.err


def test_a_cluster_may_have_a_node_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    config = ("check", "-c", "examples/quickstart.yaml", *SPREAD)
    assert "sound" in call(*config, "rolloutbus.fleet.address=auto").out
    assert "sound" in call("check", "--address", "auto", *config[1:]).out
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "sound" in call(*config).out


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "auto"])
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tried for a quarter of an hour, and heard no signal meanwhile."""
    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = call("up", "-c", "examples/quickstart.yaml", "--address", address, code=1).said
    assert "no Ray cluster answers at" in said
    assert "127.0.0.1:1 ([Errno" in " ".join(said.split())


def test_the_plan_shows_no_ports_for_what_opens_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    ports: dict[str, list[str]] = {}
    for path in ("examples/quickstart.yaml", "examples/nemo_gym/config.yaml"):
        plan = call("check", "-c", path, "--json").json
        ports[plan["environment"]] = [instance["ports"] for shard in plan["shards"] for instance in shard["instances"]]
    assert ports == {"functions": ["-", "-", "-"], "nemo_gym": ["22000-22049", "22100-22149"]}


@pytest.mark.parametrize("address", ["[::1]:1", "{a", "127.0.0.1:1"])
def test_an_address_is_taken_as_it_is_given(address: str) -> None:
    """It was read as YAML, and one in brackets showed a stack."""
    assert "sound" in call("check", "-c", "good.yaml", "--address", address).out


def test_settings_that_are_a_list_are_named_beside_an_address() -> None:
    """It was a stack of the library that reads configs."""
    Path("broken.yaml").write_text(GOOD_CONFIG.replace("rolloutbus:\n  environment: functions", "rolloutbus: [1]"))
    said = call("check", "-c", "broken.yaml", "--address", "auto", code=2).said
    assert "cannot be put into the config: rolloutbus is a list, and 'fleet' is no index" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x01: {}", "e.yaml cannot be read as a config: unacceptable character"),
        ("nemo_gym:\n  {a: ]", "e.yaml, line 2 is no valid YAML"),
        ("[1]", "e.yaml holds a list; its top level must be a mapping {shard: {entry: [server types]}}"),
        ("nemo_gym: 1", "e.yaml must map each shard to its entries: {shard: {entry: [server types]}}"),
        ("{}", "e.yaml says nothing of shard 'nemo_gym'"),
    ],
)
def test_entries_that_are_none_are_named_with_their_place(text: str, expected: str) -> None:
    Path("e.yaml").write_text(text)
    assert expected in call("check", "-c", "good.yaml", "--entries", "e.yaml", code=2).said
    assert "--entries: there is no config file" in call("check", "-c", "good.yaml", "--entries", "x", code=2).said


def test_unknown_persistence_and_role_are_named() -> None:
    assert "--persistence 'sometimes' is not known" in call("broker", "--persistence", "sometimes", code=2).said
    assert "--role 'king' is not known" in call("acl", "--role", "king", code=2).said


@pytest.mark.parametrize("password", ["a/b", "a#b", "a?b", "a%41b", "a@b", "pä", "a b", "a$b", 'a"b'])
def test_a_password_that_would_break_the_printed_url_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", password)
    said = call("broker", "--port", "0", code=2)
    assert "REDIS_PASSWORD has characters" in said.said
    assert "letters, digits and . _ ~ - * are fine" in said.said
    assert password not in said.err + said.out


@pytest.mark.parametrize("password", ["topsecret", "Aa0._~-*"])
def test_a_password_of_plain_characters_stands_in_the_url_as_it_is(
    monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setenv("REDIS_PASSWORD", password)
    assert broker_command._given_password() == password  # pyright: ignore[reportPrivateUsage]
    assert parse_address(f"redis://:{password}@127.0.0.1:1/0").password == password
