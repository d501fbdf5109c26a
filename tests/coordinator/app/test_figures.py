"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.app import figures


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.00"),
        (0.5, "0.50"),
        (-12.345, "-12.35"),
        (123.4, "123"),
        (0.012, "0.012"),
        (1e-5, "1e-05"),
        (12345.6, "12,346"),
    ],
)
def test_a_measure_has_about_three_digits(value: float | None, text: str) -> None:
    assert figures.plain(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.94, "0.94 s"), (12.34, "12.3 s"), (245, "4:05"), (7509, "2:05:09"), (None, "–")]
)
def test_a_time_is_as_exact_as_it_is_short(seconds: float | None, text: str) -> None:
    assert figures.took(seconds) == text


def test_a_sparkline_shows_the_whole_history_in_its_width() -> None:
    assert figures.sparkline([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], 7) == "▁▂▃▄▅▆▇"
    assert figures.sparkline([3, 3], 7) == "▄▄"
    assert figures.sparkline([], 7) == ""


def test_on_a_scale_of_its_own_noise_stays_small() -> None:
    assert figures.sparkline([0.95, 0.85, 0.95], 7, (0.0, 1.0)) == "▇▆▇"
    assert figures.sparkline([-5.0, 5.0], 7, (0.0, 1.0)) == "▁▇"


def test_a_span_is_never_narrower_than_asked() -> None:
    assert figures.span([0.0, 2.0, 1.0], 0.5) == (0.0, 2.0)
    assert figures.span([0.75, 1.0], 0.5) == (0.625, 1.125)
    assert figures.span([], 0.5) == (-0.25, 0.25)


@given(st.lists(st.floats(-1e100, 1e100)), st.integers(1, 30))
def test_any_history_fits(values: list[float], width: int) -> None:
    assert len(figures.sparkline(values, width)) == min(width, len(values))


def test_what_moves_a_terminal_is_made_visible() -> None:
    assert figures.readable("a\x1b[2Jb\r\nc\td") == "a�[2Jb�\nc\td"
