"""torch, torchvision or transformers that are missing or do not fit: one sentence, no traceback."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from maxvision.commands.main import main
from maxvision.common.errors import ModelError
from maxvision.weights.reference import references


@references("weights verify")
def run(error: Exception, cause: Exception | None) -> None:
    raise error from cause


NO_NMS = RuntimeError("operator torchvision::nms does not exist\nand more")
LAZY = "Could not import module 'ResNetModel'. Are this object's requirements defined correctly?"


@pytest.mark.parametrize(
    ("error", "cause", "says"),
    [
        (ModuleNotFoundError(LAZY), NO_NMS, r"torchvision does not fit torch \d.* \(operator tor"),
        (NO_NMS, None, r"\(operator torchvision::nms does not exist\); install the torchvision of"),
        (ModuleNotFoundError("No", name="torch"), None, r"needs .* but torch is not installed; ru"),
        (
            ModuleNotFoundError(LAZY),
            ModuleNotFoundError("No module", name="transformers"),
            "transformers is not installed; run (pip|script/boot)",
        ),
        (ImportError("cannot"), OSError("no libfoo"), r"transformers \d.* cannot .*\(no libfoo\)"),
    ],
)
def test_the_cause_is_named(error: Exception, cause: Exception | None, says: str) -> None:
    with pytest.raises(ModelError, match=f"^weights verify.*{says}") as caught:
        run(error, cause)
    assert "\n" not in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        run(RuntimeError("shapes"), None)


@pytest.mark.parametrize(
    "argv",
    [
        ["weights", "verify", "resnet-cifar10"],
        ["bench", "models", "--models=resnet-18", "--device=cpu", "--batches=1", "--no-peers"],
    ],
    ids=lambda argv: argv[0],
)
def test_commands_say_it(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lazily(_: Any, name: str) -> None:
        raise ModuleNotFoundError(LAZY) from NO_NMS

    name = "ResNetForImageClassification"
    monkeypatch.delitem(vars(transformers), name, raising=False)
    monkeypatch.setattr(transformers, "ResNetConfig", dict)
    monkeypatch.setattr(type(transformers), "__getattr__", lazily)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "the installed torchvision does not fit torch" in err
