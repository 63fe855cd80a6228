"""Rules are strict, and one message says everything that is wrong."""

import numpy as np
import pytest

from maxvision.common.errors import ModelError
from maxvision.weights.rules import Ignore, Rule, apply, key_for

RULES = [
    Rule(r"layer(\d)\.(\d+)\.conv\.weight", r"stages.\1.\2.weight"),
    Rule(r"fc\.(weight|bias)", r"head.\1"),
    Ignore(r".*\.num_batches_tracked", why="counter"),
]
SHAPES = {"stages.1.0.weight": (4, 2, 3, 3), "head.weight": (5,), "head.bias": (5,)}


def tensors(**changes):
    given = {
        "layer1.0.conv.weight": np.arange(72, dtype=np.float32).reshape(4, 2, 3, 3),
        "fc.weight": np.ones(5, np.float32),
        "fc.bias": np.zeros(5, np.float32),
        "bn.num_batches_tracked": np.array(7),
    }
    return given | changes


def test_fills_every_weight_as_it_is_stored():
    given = tensors()
    filled = apply(RULES, given, SHAPES, "x")
    assert {name: value.shape for name, value in filled.items()} == SHAPES
    for key, weight in (
        ("layer1.0.conv.weight", "stages.1.0.weight"),
        ("fc.weight", "head.weight"),
        ("fc.bias", "head.bias"),
    ):
        assert filled[weight] is given[key]


@pytest.mark.parametrize(
    ("weight", "key"),
    [
        ("stages.12.0.weight", None),  # the pattern takes one digit
        ("stages.1.12.weight", "layer1.12.conv.weight"),
        ("head.bias", "fc.bias"),
        ("head.var", None),
    ],
)
def test_a_rule_reads_backwards(weight, key):
    assert key_for(RULES, weight) == (key or weight)


def test_reports_everything_at_once_with_near_matches():
    given = tensors(**{"fc.weigth": np.ones(5), "layer1.0.conv.weight": np.ones((4, 3, 3, 3))})
    del given["fc.weight"]
    given["fc.bias"][2] = np.nan
    with pytest.raises(ModelError) as caught:
        apply(RULES, given, SHAPES, "net.pth")
    message = str(caught.value)
    assert message.startswith("net.pth: ")
    assert "1 missing: 'fc.weight' (did you mean 'fc.weigth'?)" in message
    assert "1 unexpected: 'fc.weigth' (did you mean 'fc.weight'?)" in message
    assert "1 misshapen: 'layer1.0.conv.weight' expects [4, 2, 3, 3] but is [4, 3, 3, 3]" in message
    assert "1 with NaN or infinity: 'fc.bias'" in message


def test_caps_long_lists():
    given = tensors(**{f"extra{i}": np.ones(1) for i in range(20)})
    with pytest.raises(ModelError, match=r"20 unexpected: 'extra0'.*'extra7', and 12 more"):
        apply(RULES, given, SHAPES, "x")


def test_a_key_that_two_rules_match_is_ambiguous():
    rules = [*RULES, Rule(r"fc\.bias", "head.bias")]
    with pytest.raises(ModelError, match=r"1 ambiguous: 'fc\.bias' matches"):
        apply(rules, tensors(), SHAPES, "x")


def test_a_weight_that_two_keys_fill_is_ambiguous():
    rules = [*RULES, Rule(r"classifier\.bias", "head.bias")]
    given = tensors(**{"classifier.bias": np.ones(5)})
    with pytest.raises(ModelError, match=r"'head\.bias' is filled by 'fc\.bias' and 'classifier"):
        apply(rules, given, SHAPES, "x")


def test_patterns_are_anchored():
    with pytest.raises(ModelError, match=r"1 unexpected: 'model\.fc\.bias'"):
        apply(RULES, tensors(**{"model.fc.bias": np.ones(5)}), SHAPES, "x")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_what_float32_does_not_hold_is_not_finite(value):
    given = tensors(**{"fc.bias": np.array([0, 1, value, 2, 3], np.float64)})
    with pytest.raises(ModelError, match=r"1 with NaN or infinity: 'fc\.bias'"):
        apply(RULES, given, SHAPES, "x")
