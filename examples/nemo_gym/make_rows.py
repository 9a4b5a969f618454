"""Write the example rows of mcqa and workplace_assistant that NeMo Gym ships, with their agents: `make_rows.py >
rows.jsonl`.

With `--data` it prints where those rows are instead, for the canned model to know their answers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

AGENTS = {"mcqa": "mcqa_simple_agent", "workplace_assistant": "workplace_assistant_simple_agent"}


def data_of(environment: str) -> Path:
    """The shipped example rows; NeMo Gym is not imported for it."""
    found = importlib.util.find_spec("nemo_gym")
    if found is None or found.origin is None:
        sys.exit("NeMo Gym is not installed here; on Python 3.12 or newer: pip install 'rolloutbus[nemo-gym]'")
    return Path(found.origin).parents[1] / "resources_servers" / environment / "data" / "example.jsonl"


def main() -> None:
    for environment, agent in AGENTS.items():
        data = data_of(environment)
        if "--data" in sys.argv:
            print(data)
            continue
        for line in data.read_text().splitlines():
            print(json.dumps({**json.loads(line), "agent_ref": {"name": agent}}))


if __name__ == "__main__":
    main()
