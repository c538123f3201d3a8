"""Rules for a body: known fields, and sparse tensors of a bounded size."""

from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ..training import describe_unknown
from .invalid import Invalid, UnknownName
from .values import JsonObject

MAX_DENSE_BYTES = 1 << 30
"""Maximum bytes that the sparse tensors of one request may take when made dense."""


@dataclass
class Rules:
    """The rules for one body. Each level is checked where it is decoded, so that the first error ends the decoding."""

    dense_bytes: int = MAX_DENSE_BYTES
    """Memory that sparse tensors may still take when made dense."""
    ignore_unknown: bool = False
    """Fields that this version does not know are dropped, which a newer SDK may have sent: they are refused else, since
    the model would be trained on something else."""
    was_accepted: bool = False
    """An earlier version accepted the body: what only later ones refuse is not refused."""

    def take_dense(self, num_bytes: int) -> None:
        self.dense_bytes -= num_bytes
        if self.dense_bytes < 0:
            raise Invalid(
                f"sparse tensors of one request exceed the limit of dense bytes by {-self.dense_bytes}: "
                "send fewer datums in one call, or narrower tensors"
            )

    def check_names(self, value: JsonObject, kind: str, known: Iterable[str], changes_results: bool = True) -> None:
        """Raises UnknownName for an unknown key of a JSON object. kind: what the object is."""
        if (unknown := value.keys() - known) and not self.ignore_unknown:
            raise UnknownName(describe_unknown(kind, min(unknown), known), changes_results)

    def check_fields(self, *messages: Message) -> None:
        """Raises UnknownName if a protobuf message has an unknown field. Nested messages are not checked."""
        for message in messages:
            if len(unknown := UnknownFieldSet(message)) and not self.ignore_unknown:
                known = ", ".join(f"{field.number} {field.name}" for field in message.DESCRIPTOR.fields)
                raise UnknownName(
                    f"{message.DESCRIPTOR.name} has no field {unknown[0].field_number}: it has {known}; a newer client "
                    "may have sent it"
                )
