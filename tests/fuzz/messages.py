"""Random messages: protobuf messages with arbitrary fields, and damaged bytes of messages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_DEEPEST: Final = 4
_NUMBERS: Final = (0, 1, 2, 3, 7, 255, 1 << 20, (1 << 31) - 1, (1 << 53) + 1, (1 << 63) - 1)
_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
_LIMITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


class Messages:
    """Generates messages. The same state of `chance` gives the same messages."""

    def __init__(
        self, chance: random.Random, words: Sequence[str], likely: Mapping[str, Any] | None = None
    ) -> None:
        """Creates a generator.

        words: strings that are meaningful to the service, such as member ids and tensor names.
        likely: the usual value of a field by its name, so that messages pass the first checks.
        """
        self._chance = chance
        self._words = words
        self._likely = likely or {}

    def arbitrary(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """Returns a message of this type with arbitrary fields and any values that protobuf can
        carry."""
        message: Message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if (
                field.name in self._likely
                and not field.is_repeated
                and self._chance.random() < 0.85
            ):
                setattr(message, field.name, self._likely[field.name])
            elif self._chance.random() < (
                0.25 if depth >= _DEEPEST or field.name == "run" else 0.7
            ):
                self._fill(message, field, depth)
        return message

    def spoilt(self, data: bytes) -> bytes:
        """Returns the bytes of a message with some changed, missing or added, or sometimes random
        bytes."""
        chance = self._chance
        kind = chance.randrange(6)
        if kind == 0:
            return chance.randbytes(chance.choice((0, 1, 7, 64, 1000)))
        if kind == 1:
            return data[: chance.randrange(len(data) + 1)]
        if kind == 2:
            return data + chance.randbytes(chance.randrange(1, 20))
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 6)):
            if changed:
                changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)

    def encoded(self, descriptor: Descriptor) -> bytes:
        """Returns the bytes to send: usually a message of the type, otherwise damaged bytes."""
        data = self.arbitrary(descriptor).SerializeToString()
        return data if self._chance.random() < 0.75 else self.spoilt(data)

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.is_repeated:
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                for _ in range(self._chance.randrange(3)):
                    entry = field.message_type.fields_by_name
                    key = self._value(entry["key"])
                    if entry["value"].message_type is None:
                        getattr(message, field.name)[key] = self._value(entry["value"])
                return
            count = (
                self._chance.choice((0, 1, 2, 3, 200)) if depth < 2 else self._chance.randrange(3)
            )
            for _ in range(count):
                if field.message_type is not None:
                    if depth < _DEEPEST and count < 10:
                        getattr(message, field.name).add().MergeFrom(
                            self.arbitrary(field.message_type, depth + 1)
                        )
                else:
                    getattr(message, field.name).append(self._value(field))
        elif field.message_type is not None:
            if depth < _DEEPEST:
                getattr(message, field.name).MergeFrom(
                    self.arbitrary(field.message_type, depth + 1)
                )
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        chance = self._chance
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return chance.random() < 0.5
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return chance.choice((*_FLOATS, chance.uniform(-1e3, 1e3)))
            case FieldDescriptor.CPPTYPE_ENUM:
                return chance.choice((*(value.number for value in field.enum_type.values), 99, -1))
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return chance.randbytes(chance.choice((0, 1, 8, 16, 32, 300)))
            case FieldDescriptor.CPPTYPE_STRING:
                return chance.choice(
                    (
                        *self._words,
                        *self._words,
                        "",
                        "a",
                        "\0",
                        "ü",
                        "x" * 130,
                        "a b",
                        "../..",
                        "{0}",
                        "127.0.0.1:1",
                    )
                )
            case kind:
                low, high = _LIMITS[kind]
                return min(
                    max(
                        chance.choice((1, 1, 1, -1))
                        * chance.choice((*_NUMBERS, chance.randrange(1 << 16))),
                        low,
                    ),
                    high,
                )
