"""Makes message classes of ``inference.proto``, without a compiler of it.

What is read is what that file has: messages and enums, nested too, fields that are plain, repeated,
of a map or of a oneof, and calls with one request and one answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FILE = Path(__file__).with_name("inference.proto")

_TOKENS = re.compile(r'[\w.]+|[{}()<>=;,]|"[^"]*"')
_Field = descriptor_pb2.FieldDescriptorProto


class Protocol:
    """Messages and calls of a file.

    Attributes:
        service: The service's name, with its package.
        calls: Request and answer of each call, which are classes of messages.

    Args:
        text: Of the file.
    """

    def __init__(self, text: str) -> None:
        tokens = iter(_TOKENS.findall(re.sub(r"//.*", "", text)))
        file = descriptor_pb2.FileDescriptorProto(name="inference.proto", syntax="proto3")
        calls: dict[str, tuple[str, str]] = {}
        for token in tokens:
            if token == "package":
                file.package = next(tokens)
            elif token == "service":
                self.service = f"{file.package}.{next(tokens)}"
                calls = _calls(tokens)
            elif token == "message":
                _read_message(tokens, file.message_type.add())
            elif token == "enum":
                _read_enum(tokens, file.enum_type.add())
        pool = descriptor_pool.DescriptorPool()  # of its own: a client may have the same names
        pool.AddSerializedFile(file.SerializeToString())

        def message(name: str) -> Any:
            found = pool.FindMessageTypeByName(f"{file.package}.{name}")
            return message_factory.GetMessageClass(found)

        self.calls = {call: (message(a), message(b)) for call, (a, b) in calls.items()}


def _calls(tokens: Iterator[str]) -> dict[str, tuple[str, str]]:
    """Reads ``rpc Call(Request) returns (Answer);`` up to the service's end."""
    found = {}
    next(tokens)
    for token in tokens:
        if token == "}":
            break
        if token == "rpc":
            call, _, asked, _, _, _, answered = (next(tokens) for _ in range(7))
            found[call] = asked, answered
    return found


def _read_message(tokens: Iterator[str], made: Any) -> None:
    made.name = next(tokens)
    next(tokens)
    _read_fields(tokens, made)


def _read_fields(tokens: Iterator[str], made: Any, choice: int | None = None) -> None:
    """Reads what stands in a message, or in one of its oneofs, the number of which is given."""
    for token in tokens:
        if token == "}":
            return
        if token == "message":
            _read_message(tokens, made.nested_type.add())
        elif token == "enum":
            _read_enum(tokens, made.enum_type.add())
        elif token == "oneof":
            made.oneof_decl.add(name=next(tokens))
            next(tokens)
            _read_fields(tokens, made, len(made.oneof_decl) - 1)
        elif token == "map":
            _, key, _, value, _, name = (next(tokens) for _ in range(6))
            entry = made.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _add(entry, key, "key", 1)
            _add(entry, value, "value", 2)
            _add(made, entry.name, name, _number(tokens), repeated=True)
        else:
            repeated = token == "repeated"
            kind = next(tokens) if repeated else token
            field = _add(made, kind, next(tokens), _number(tokens), repeated=repeated)
            if choice is not None:
                field.oneof_index = choice


def _read_enum(tokens: Iterator[str], made: Any) -> None:
    made.name = next(tokens)
    next(tokens)
    for token in tokens:
        if token == "}":
            return
        made.value.add(name=token, number=_number(tokens))


def _number(tokens: Iterator[str]) -> int:
    _, number, _ = (next(tokens) for _ in range(3))
    return int(number)


def _add(made: Any, kind: str, name: str, number: int, *, repeated: bool = False) -> Any:
    label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    field = made.field.add(name=name, number=number, label=label)
    try:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    except ValueError:  # a message or an enum: the pool finds out which
        field.type_name = kind
    return field


INFERENCE = Protocol(FILE.read_text())
