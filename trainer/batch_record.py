"""What the broker keeps of a batch, read by a client that comes back to it; it may have been changed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, Json, PositiveInt, ValidationError, model_validator

from ..broker.group_record import GroupRecord, parse_group_record
from ..broker.inspection import decoded
from ..broker.messages import ForeignEntryError
from ..collector import BatchCollection
from ..collector.sweep import ABANDONED
from ..producer import CHECKSUM_LENGTH, PromptGroup


class BatchRecord(BaseModel):
    """The fields of the batch's hash that are not its groups'."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    groups: PositiveInt
    rows: PositiveInt
    group_size: PositiveInt
    published: int = Field(ge=0)
    cancelled: int = Field(ge=0)
    max_unread_bytes: int = Field(ge=0)
    # Runs of groups in order: shard, route, how many.
    layout: Json[list[tuple[str, str, PositiveInt]]]
    # One per group, in order. A batch that an earlier version published has none.
    checksums: str = ""

    @model_validator(mode="after")
    def _check_sums(self) -> Self:
        laid_out = sum(count for _, _, count in self.layout)
        if self.groups * self.group_size != self.rows or laid_out != self.groups or self.published > self.groups:
            raise ValueError("its numbers do not agree")
        if len(self.checksums) not in (0, self.groups * CHECKSUM_LENGTH):
            raise ValueError("it has not one checksum per group")
        return self

    @property
    def published_checksums(self) -> dict[int, str]:
        """Of each group, what its rows were; empty where that is not known."""
        starts = range(0, len(self.checksums), CHECKSUM_LENGTH)
        return {group: self.checksums[at : at + CHECKSUM_LENGTH] for group, at in enumerate(starts)}

    def laid_out(self, rows: Sequence[dict[str, Any]]) -> list[PromptGroup]:
        """The groups, each with its part of `rows`."""
        groups: list[PromptGroup] = []
        for shard, route, count in self.layout:
            for _ in range(count):
                first = len(groups) * self.group_size
                groups.append(PromptGroup(len(groups), first, route, shard, rows[first : first + self.group_size]))
        return groups


class StoredBatch:
    """A batch's whole hash. Raises `ForeignEntryError` for what nobody of ours wrote."""

    def __init__(self, batch: str, flat: Sequence[bytes]) -> None:
        self._batch, self._fields = batch, decoded(flat)
        try:
            self.record = BatchRecord.model_validate(self._fields)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise self._changed(f"{'.'.join(map(str, first['loc']))} {first['msg']}".strip()) from None

    def tell(self, collection: BatchCollection) -> None:
        """What has become of its groups while the client was away."""
        for group in range(self.record.groups):
            state = self._state(group)
            if self.record.cancelled and (state is None or state.status == "abandoned"):
                collection.fail(group, ABANDONED)
            elif state is None:
                collection.skip(group)
            elif state.told or state.status == "handed":
                collection.skip(group, completed=not state.told, failed=state.told)

    def _state(self, group: int) -> GroupRecord | None:
        """Its record; None where it has none."""
        raw = self._fields.get(f"g:{group}")
        record = None if raw is None else parse_group_record(raw.encode())
        if raw is not None and record is None:
            raise self._changed(f"g:{group} is {raw[:60]!r}")
        return record

    def _changed(self, what: str) -> ForeignEntryError:
        return ForeignEntryError(
            f"the record of batch {self._batch} was changed by somebody ({what}); end it with `rolloutbus cancel "
            f"{self._batch}`, and run it again"
        )
