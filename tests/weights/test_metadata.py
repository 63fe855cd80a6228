"""Labels that a user gives in place of a model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxvision.common.errors import ArgumentError
from maxvision.weights import match_labels, read_labels


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.txt", "tabby, tabby cat\nKäfer\n[dog]\n"),
        ("labels", "\ufefftabby, tabby cat  \r\nKäfer\r\n[dog]\r\n\r\n"),
        ("labels.json", '["tabby, tabby cat", "K\\u00e4fer", "[dog]"]'),
        ("labels.JSON", '{"2": "[dog]", "0": "tabby, tabby cat", "1": "Käfer"}'),
        ("config.json", '{"id2label": {"0": "tabby, tabby cat", "1": "Käfer", "2": "[dog]"}}'),
    ],
)
def test_files_of_labels(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode())
    expected = ["tabby, tabby cat", "Käfer", "[dog]"]
    assert read_labels(tmp_path / name) == read_labels(str(tmp_path / name)) == expected
    assert read_labels(tuple(expected)) == expected


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("l.txt", b"cat\n\ndog\n", "the label of class 1 is ''; give every class a name"),
        ("l.txt", b"", "the file is empty; write a label on each line"),
        ("l.txt", b"\xff\xd8\xff\xe0", "this is not a text file; give one with a label on each"),
        ("l.json", b'["cat", ["dog"]]', r"the label of class 1 is \['dog'\]"),
        ("l.json", b'{"0": "cat", "2": "dog"}', "every class from 0 on"),
        ("l.json", b'{"cat": 0}', "must hold a JSON list of labels, or"),
        ("l.json", b'"cat"', "must hold a JSON list of labels, or"),
        ("l.json", b"cat\ndog", "must hold a JSON list of labels, or"),
        ("l.json", b"[" * 100_000, "must hold a JSON list of labels, or"),
    ],
)
def test_files_that_hold_something_else(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=f"labels .*{name}: .*{says}") as caught:
        read_labels(tmp_path / name)
    assert len(str(caught.value)) < 300


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"labels none\.txt: .* read \(No such file"):
        read_labels("none.txt")
    with pytest.raises(ArgumentError, match=r"cannot be read \(Is a directory"):
        read_labels(tmp_path)


def test_their_number_is_that_of_the_classes() -> None:
    assert match_labels(["a", "b"], ["class 0", "class 1"], "m") == ["a", "b"]
    with pytest.raises(ArgumentError, match="labels: there are 1 but m has 2 classes; give one"):
        match_labels(["a"], ["class 0", "class 1"], "m")


def test_the_labels_of_a_bundled_model_are_a_file_of_labels() -> None:
    from maxvision.weights import load
    from maxvision.weights.source import BUNDLED

    config = BUNDLED / "resnet-cifar10/config.json"
    labels = load("resnet-cifar10").labels
    assert read_labels(config) == labels and len(labels) == 10
    assert "id2label" in json.loads(config.read_text())
