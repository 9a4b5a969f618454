"""Names that can stand in a key, and those that cannot."""

from __future__ import annotations

import pytest
from rolloutbus.broker.errors import ConfigError
from rolloutbus.broker.keys import Keys, check_name


@pytest.mark.parametrize("name", ["exp1", "0", "GRPO-2026.11_b", "a" * 200])
def test_a_name_of_letters_digits_dots_underscores_and_hyphens_is_fine(name: str):
    assert check_name("run", name) == name
    assert Keys(name).routes == f"rolloutbus:{{{name}}}:routes"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "a}b", "-a", ".a", "a/b", "ä", "a\n", "a*", "٣"])
def test_any_other_name_is_refused_and_the_error_names_it(name: str):
    with pytest.raises(ConfigError, match="cannot be a name on the broker") as caught:
        Keys(name)
    assert repr(name) in str(caught.value)
    assert str(caught.value).startswith("run ")


def test_two_clients_never_share_a_result_stream():
    keys = Keys("r")
    assert keys.results("a", "b") != keys.results("b", "a")
    assert keys.results("trainer", "math") == "rolloutbus:{r}:results:trainer:math"
