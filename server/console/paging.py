"""Pages: the links between the pages of a list."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query

from ...schemas.bounds import MAX_ID

PageNumber = Annotated[int, Query(alias="page", ge=1, le=1_000_000)]
Search = Annotated[str, Query(max_length=MAX_ID)]


@dataclass(frozen=True)
class Pages:
    """The present page of a list, from 1. query: of its filters."""

    path: str
    query: Mapping[str, str]
    number: int
    size: int
    num_entries: int

    @property
    def last(self) -> int:
        return max(1, -(-self.num_entries // self.size))

    @property
    def words(self) -> str:
        first = self.size * (self.number - 1) + 1
        if first > self.num_entries:
            return f"none of {self.num_entries:,}"
        return f"{first:,} to {min(first + self.size - 1, self.num_entries):,} of {self.num_entries:,}"

    def url(self, number: int) -> str:
        query = {name: value for name, value in self.query.items() if value}
        return f"{self.path}?{urlencode({**query, 'page': number})}"
