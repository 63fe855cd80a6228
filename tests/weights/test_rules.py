"""Rules are strict, and one message says everything that is wrong."""

import numpy as np
import pytest

from maxvision.common.errors import ModelError
from maxvision.weights.layout import as_is, oihw_to_rscf, token
from maxvision.weights.rules import Ignore, Rule, apply, key_for

RULES = [
    Rule(r"layer(\d)\.(\d+)\.conv\.weight", r"stages.\1.\2.filter", oihw_to_rscf),
    Rule(r"fc\.(weight|bias)", r"head.\1"),
    Ignore(r".*\.num_batches_tracked", why="counter"),
]
SHAPES = {"stages.1.0.filter": (3, 3, 2, 4), "head.weight": (5,), "head.bias": (5,)}


def tensors(**changes):
    given = {
        "layer1.0.conv.weight": np.arange(72, dtype=np.float32).reshape(4, 2, 3, 3),
        "fc.weight": np.ones(5, np.float32),
        "fc.bias": np.zeros(5, np.float32),
        "bn.num_batches_tracked": np.array(7),
    }
    return given | changes


def test_fills_every_weight_in_its_layout():
    filled = apply(RULES, tensors(), SHAPES, "x")
    assert {name: value.shape for name, value in filled.items()} == SHAPES
    stored = tensors()["layer1.0.conv.weight"]
    assert filled["stages.1.0.filter"][2, 1, 0, 3] == stored[3, 0, 2, 1]


@pytest.mark.parametrize(
    ("weight", "key"),
    [
        ("stages.12.0.filter", None),  # the pattern takes one digit
        ("stages.1.12.filter", "layer1.12.conv.weight"),
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


@pytest.mark.parametrize("layout", [as_is, oihw_to_rscf, token])
def test_a_layout_undoes_itself_in_shape(layout):
    shape = (3, 5, 2, 7) if layout is not token else (7,)
    assert layout(np.zeros(layout.stored(shape))).shape == shape
