"""The guards that `tests.chaos.mutations` weakens are where it looks for them; that each is missed takes it minutes."""

from __future__ import annotations

import pytest

from tests.chaos.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_guard_is_where_the_mutation_expects_it(mutation: Mutation) -> None:
    assert mutation.guard in (ROOT / mutation.path).read_text(encoding="utf-8")
