"""The package's names, which are looked up when they are first used."""

from __future__ import annotations

import pytest
from rolloutbus import trainer


@pytest.mark.parametrize("name", trainer.__all__)
def test_a_name_is_looked_up_once_and_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(trainer), name, raising=False)
    assert name in dir(trainer)
    assert getattr(trainer, name) is vars(trainer)[name]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Rollouts'"):
        _ = trainer.Rollouts  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
