"""What a mistake on a command line gets: one sentence, what was perhaps meant, and the way out."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from maxvision.common.arguments import DTYPES, Parser, counts, device, meant, number, whole
from maxvision.graphs.target import GPUS
from maxvision.weights.catalog import PACKAGED
from maxvision.weights.prune import PATTERNS, SCOPES


def parser() -> Parser:
    made = Parser(prog="maxvision thing")
    made.add_argument("images", nargs="*")
    made.add_argument("--top-k", type=whole(1, 9))
    made.add_argument("--dtype", choices=DTYPES)
    made.add_argument("--device", type=device)
    made.add_argument("--batch-size", type=counts)
    return made


def nested() -> Parser:
    made = Parser(prog="maxvision weights")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect")
    inspect.add_argument("model")
    inspect.add_argument("--all", action="store_true")
    return made


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--topk", "3"], "there is no option --topk; did you mean --top-k?"),
        (["--top_k=3"], "there is no option --top_k; did you mean --top-k?"),
        (["--batch", "3"], "there is no option --batch; did you mean --batch-size?"),
        (["x", "--colour"], "there is no option --colour"),
        (["x", "-t", "3"], "there is no option -t; did you mean --top-k?"),
        (["x", "-d", "cpu"], "there is no option -d"),
        (["--dtype", "fp16"], "did you mean float16?"),
        (["--dtype", "bf16"], "did you mean bfloat16?"),
        (["--dtype", "flaot32"], "did you mean float32?"),
        (["--dtype", "int3"], "'int3' is none of auto, float32, bfloat16, float16"),
        (["--device", "cuda"], "--device takes auto, cpu, gpu or gpu:N, not 'cuda'; did you mean"
         " gpu?"),
        (["--device", "cuda:1"], "did you mean gpu:1?"),
        (["--device", "tpu"], "gpu:N, not 'tpu'"),
        (["--top-k", "0"], "--top-k takes a whole number from 1 to 9, not '0'"),
        (["--batch-size", "1,x"], "--batch-size takes whole numbers of at least 1, such as 1,16,"
         " not '1,x'"),
        (["--top-k"], "--top-k: expected one argument"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mixed", [False, True])
def test_a_mistake_is_one_sentence_and_points_to_help(
    argv: list[str], said: str, mixed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made = parser()
    with pytest.raises(SystemExit) as stop:
        (made.parse_intermixed_args if mixed else made.parse_args)(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert not out and first.startswith("error: ") and said in first
    assert ("did you mean" in first) == ("did you mean" in said)
    assert second == "maxvision thing --help lists what it takes"


@pytest.mark.parametrize(
    ("argv", "said", "where"),
    [
        (["inspct", "x"], "COMMAND: 'inspct' is none of inspect; did you mean inspect?", ""),
        (["inspect", "x", "--al"], "there is no option --al; did you mean --all?", " inspect"),
        (["inspect", "x", "y"], "unrecognized argument: y", " inspect"),
    ],
)
def test_the_mistake_is_that_of_the_command_it_was_made_in(
    argv: list[str], said: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        nested().parse_args(argv)
    lines = [f"error: {said}", f"maxvision weights{where} --help lists what it takes"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("argv", [["--debug", "inspect", "x"], ["inspect", "x", "--debug"]])
def test_debug_may_stand_anywhere(argv: list[str]) -> None:
    assert nested().parse_args(argv).debug
    assert not hasattr(nested().parse_args(["inspect", "x"]), "debug")


def test_options_and_images_in_any_order() -> None:
    args = parser().parse_intermixed_args(["a", "--top-k", "3", "b", "--debug", "c"])
    assert (args.images, args.top_k, args.debug) == (["a", "b", "c"], 3, True)


def test_files_that_begin_with_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-x.jpg").touch()
    for words in ["--top-k", "3", "a", "--", "-x.jpg", "-"], ["a", "--top-k", "3", "./-x.jpg", "-"]:
        assert parser().parse_intermixed_args(words).images == ["a", "./-x.jpg", "-"]
    with pytest.raises(SystemExit):
        parser().parse_intermixed_args(["-x.jpg"])
    said = "there is no option -x.jpg; for the file of that name write ./-x.jpg\n"
    assert said in capsys.readouterr().err


def test_a_model_without_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    made = Parser(prog="maxvision serve")
    made.add_argument("--model")
    with pytest.raises(SystemExit):
        made.parse_args(["resnet-50"])
    assert "resnet-50; did you mean --model resnet-50?\n" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("sm_90", "sm_90a"), ("SM90a", "sm_90a"), ("h100", "sm_90a"), ("H200", "sm_90a"),
        ("a100", "sm_80"), ("mi300x", "gfx942"), ("b200", "sm_100a"), ("avx2", "cpu:x86-64-v3"),
    ],
)  # fmt: skip
def test_gpus_are_known_by_their_names(word: str, near: str) -> None:
    assert meant(word, ["cpu", "cpu:x86-64-v3", *GPUS]) == f"; did you mean {near}?"


def test_nothing_is_suggested_that_is_far_away() -> None:
    assert meant("zebra", ["cpu", *GPUS]) == meant("", ["cpu"]) == meant("x:y", ["gpu"]) == ""


def test_numbers() -> None:
    assert whole(0, 5)("5") == 5 and number(0, 1)("0.5") == 0.5 and counts("1, 16") == [1, 16]
    for take, text in [(whole(0, 5), "6"), (number(0, 1), "nan"), (number(0, 1), "x"),
                       (counts, ""), (counts, "0"), (whole(0, 5), "٣")]:  # fmt: skip
        with pytest.raises(argparse.ArgumentTypeError, match=r"^takes .*, not"):
            take(text)


def test_names_that_are_written_here_are_those_elsewhere() -> None:
    """The command lines name them without the imports that they would take."""
    from maxvision.commands import weights
    from maxvision.common.arguments import DEFAULT_MODEL
    from maxvision.runtime import devices

    assert DEFAULT_MODEL in PACKAGED
    assert set(DTYPES) == {"auto", *devices.DTYPES}
    assert (tuple(PATTERNS), SCOPES) == (weights.PATTERNS, weights.SCOPES)
