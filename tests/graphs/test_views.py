"""Views: chains of permutes and reshapes lie where numpy puts their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxvision.graphs.views import View

SEEDED = settings(derandomize=True, deadline=None)
BATCH = 7
"""The size of a symbolic batch; divides no other size here."""
SIZES = st.sampled_from([1, 1, 2, 3, 4, 6, 8, 12])


def sizes(shape: Sequence[int | str]) -> list[int]:
    return [BATCH if isinstance(size, str) else size for size in shape]


def laid_out(view: View, array: np.ndarray) -> np.ndarray:
    """Lays an array out as a view says, in the steps that the pass takes."""
    first, axes, shape = view.steps()
    return array.reshape(sizes(first)).transpose(axes).reshape(sizes(shape))


@st.composite
def shapes(draw: st.DrawFn) -> list[int | str]:
    shape: list[int | str] = draw(st.lists(SIZES, min_size=1, max_size=4))
    if draw(st.booleans()):
        shape[draw(st.integers(0, len(shape) - 1))] = "batch"
    return shape


@st.composite
def moves(draw: st.DrawFn, shape: list[int | str]) -> tuple[str, list[int | str]]:
    """Draws a permute's axes, or a shape of as many numbers; a symbolic size stays whole."""
    if draw(st.booleans()):
        return "permute", draw(st.permutations(range(len(shape))))
    parts: list[int | str] = []
    for size in shape:
        while isinstance(size, int) and size > 1 and draw(st.booleans()):
            part = draw(st.sampled_from([d for d in range(2, size + 1) if size % d == 0]))
            parts.append(part)
            size //= part
        parts.append(size)
    joined: list[int | str] = []
    for part in parts:
        known = isinstance(part, int) and joined and isinstance(joined[-1], int)
        if known and draw(st.booleans()):
            joined[-1] *= part  # type: ignore[operator]
        else:
            joined.append(part)
    if draw(st.booleans()):
        joined.insert(draw(st.integers(0, len(joined))), 1)
    if draw(st.booleans()):
        joined = [size for size in joined if size != 1] or [1]
    return "reshape", joined


@st.composite
def chains(
    draw: st.DrawFn, shape: list[int | str] | None = None
) -> tuple[list[int | str], View, np.ndarray, np.ndarray]:
    """Draws a shape and moves: the view that they make, and the numbers before and behind."""
    shape = shape or draw(shapes())
    view, start = View.of(shape), list(shape)
    before = np.arange(math.prod(sizes(shape))).reshape(sizes(shape))
    array = before
    for _ in range(draw(st.integers(0, 5))):
        kind, to = draw(moves(shape))
        if kind == "permute":
            view = view.permuted(to)  # type: ignore[arg-type]
            array, shape = array.transpose(to), [shape[i] for i in to]  # type: ignore[arg-type, index]
        elif (after := view.reshaped(to)) is not None:
            view, array, shape = after, array.reshape(sizes(to)), list(to)
        assert view.shape == tuple(shape)
    return start, view, before, array


@SEEDED
@given(chains())
def test_a_view_of_a_chain_is_what_numpy_makes_of_it(
    chain: tuple[list[int | str], View, np.ndarray, np.ndarray],
) -> None:
    start, view, before, after = chain
    assert view.source_shape == tuple(start)
    np.testing.assert_array_equal(laid_out(view, before), after)
    assert view.keeps_order == (np.array_equal(after.ravel(), before.ravel()))
    same = after.shape == before.shape and np.array_equal(after, before)
    assert view.is_identity == same


@SEEDED
@given(chains())
def test_the_inverse_leads_back(
    chain: tuple[list[int | str], View, np.ndarray, np.ndarray],
) -> None:
    _, view, before, after = chain
    back = view.inverse()
    assert (back.shape, back.source_shape) == (view.source_shape, view.shape)
    np.testing.assert_array_equal(laid_out(back, after), before)
    there = view.then(back)
    assert there is not None and there.is_identity
    np.testing.assert_array_equal(laid_out(back.inverse(), before), after)


@SEEDED
@given(chains())
def test_a_divided_source_holds_the_same(
    chain: tuple[list[int | str], View, np.ndarray, np.ndarray],
) -> None:
    _, view, before, after = chain
    divided = view.divided()
    assert divided.shape == view.shape and divided.divided() == divided
    assert divided.axes is not None or divided == view
    held = before.reshape(sizes(divided.source_shape))
    np.testing.assert_array_equal(laid_out(divided, held), after)


def test_tokens_that_become_an_image_are_divided_as_it_is() -> None:
    view = View.of(("batch", 24, 3)).permuted((0, 2, 1)).reshaped(("batch", 3, 4, 6))
    assert view is not None and view.axes is None
    assert view.divided().axes == (0, 3, 1, 2)
    assert view.divided().source_shape == ("batch", 4, 6, 3)
    windows = View.of((4, 6, 3)).reshaped((2, 2, 3, 2, 3))
    assert windows is not None
    windows = windows.permuted((0, 2, 1, 3, 4)).reshaped((6, 4, 3))
    assert windows is not None and windows.divided() == windows


@SEEDED
@given(st.data())
def test_one_view_then_another_is_both(data: st.DataObject) -> None:
    _, one, before, between = data.draw(chains())
    _, two, _, _ = data.draw(chains(list(one.shape)))
    both = one.then(two)
    if both is not None:
        wanted = laid_out(two, between)
        np.testing.assert_array_equal(laid_out(both, before), wanted)
        assert both.shape == two.shape and both.source_shape == one.source_shape


@SEEDED
@given(chains())
def test_what_is_laid_out_again_is_the_same(
    chain: tuple[list[int | str], View, np.ndarray, np.ndarray],
) -> None:
    """A view of the steps of a view is that view."""
    _, view, before, after = chain
    first, axes, shape = view.steps()
    again = View.of(view.source_shape).reshaped(first)
    assert again is not None
    again = again.permuted(axes).reshaped(shape)
    assert again is not None
    np.testing.assert_array_equal(laid_out(again, before), after)


def test_images_to_tokens_and_back_is_nothing() -> None:
    view = View.of(("batch", 4, 6, 3)).permuted((0, 3, 1, 2))
    assert not view.keeps_order and view.shape == ("batch", 3, 4, 6)
    tokens = view.reshaped(("batch", 3, 24))
    assert tokens is not None
    tokens = tokens.permuted((0, 2, 1))
    assert tokens.keeps_order and not tokens.is_identity
    image = tokens.reshaped(("batch", 4, 6, 3))
    assert image is not None and image.is_identity


def test_axes_of_size_1_may_go_anywhere() -> None:
    view = View.of((1, "batch", 1, 5)).permuted((3, 0, 1, 2))
    assert view.shape == (5, 1, "batch", 1)
    back = view.reshaped((5, "batch"))
    assert back is not None
    back = back.permuted((1, 0)).reshaped(("batch", 1, 5))
    assert back is not None and back.keeps_order and not back.is_identity
    ones = View.of((1, 1)).permuted((1, 0))
    assert ones.is_identity and ones.reshaped((1, 1, 1)).shape == (1, 1, 1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("shape", "to"),
    [((4, 6), (3, 8)), (("batch", 6), (6, "batch")), (("batch", 6), ("batch", 5)),
     ((6,), (2, 2)), ((6,), (2, 3, 2)), (("batch",), (7,)), ((6,), ("batch",)),
     (("batch", 6), ("batch", 12)), ((2, 3), ())],
)  # fmt: skip
def test_sizes_without_common_factors_have_no_view(
    shape: tuple[int | str, ...], to: tuple[int | str, ...]
) -> None:
    assert View.of(shape).reshaped(to) is None


def test_a_shape_without_numbers_is_viewed_where_its_sizes_stay() -> None:
    view = View.of((2, 0, 3)).permuted((1, 0, 2)).reshaped((0, 6))
    assert view is not None and view.shape == (0, 6) and not view.keeps_order
    assert View.of((2, 0, 3)).reshaped((3, 0)) is None


def test_views_that_do_not_meet_have_none_together() -> None:
    one = View.of((4, 6)).permuted((1, 0))
    assert one.then(View.of((6, 4)).permuted((1, 0))) == View.of((4, 6))
    assert one.then(View.of((8, 3))) is None
