"""`route_of`: the route of a row, by NeMo Gym's rule."""

from __future__ import annotations

from typing import Any

import pytest
from rolloutbus.broker.errors import RouteError, RowTypeError
from rolloutbus.broker.routes import route_of


@pytest.mark.parametrize(
    ("row", "route"),
    [
        ({"agent_ref": {"name": "math"}}, "math"),
        ({"agent_ref": {"name": "math", "type": "x"}, "task_source": "other"}, "math"),
        ({"task_source": "math"}, "math"),
        ({"agent_ref": None, "task_source": "math"}, "math"),
        ({"agent_ref": {}, "task_source": "math"}, "math"),
        ({"agent_ref": {"name": ""}, "task_source": "math"}, "math"),
    ],
)
def test_agent_ref_wins_over_task_source(row: dict[str, Any], route: str):
    assert route_of(row) == route


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"agent_ref": {"name": ""}},
        {"agent_ref": "math"},
        {"agent_ref": {"name": 3}},
        {"task_source": ""},
        {"task_source": None},
        {"task_source": ["math"]},
    ],
)
def test_a_row_without_a_route_is_told_about_both_keys(row: dict[str, Any]):
    with pytest.raises(RouteError, match=r"no route: `agent_ref` is .* and `task_source` is .*ENTRY"):
        route_of(row)


@pytest.mark.parametrize("row", [None, "math", ["math"]])
def test_a_row_that_is_no_mapping_is_a_type_error(row: Any):
    with pytest.raises(RowTypeError, match="a row must be a dict"):
        route_of(row)
