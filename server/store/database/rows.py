"""Converts records to rows and back. A record's fields are named like its table's columns."""

from typing import TypeVar

from sqlalchemy import Row

from ....schemas.models import TrainingConfig, training_of
from ....schemas.schedules import RunSchedules

Record = TypeVar("Record")


def row_values(record: object) -> dict[str, object]:
    return {name: _column_value(value) for name, value in vars(record).items()}


def _column_value(value: object) -> object:
    if isinstance(value, TrainingConfig | RunSchedules):
        return value.model_dump()
    return list(value) if isinstance(value, tuple) else value


def record_of(record_type: type[Record], row: Row) -> Record:
    values = dict(row._mapping)
    if "training" in values:
        values["training"] = training_of(values["training"])
    if "schedules" in values:
        values["schedules"] = RunSchedules.model_validate(values["schedules"] or {})
    return record_type(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
