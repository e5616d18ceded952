from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.synthetic.calendar import clock, days_in_month, earlier, half_day_clock, later

day = st.dates(date(2020, 1, 1), date(2031, 12, 31))


@given(day, st.integers(0, 120))
def test_later(start, days):
    working, result = later(start, days)
    assert result == start + timedelta(days=days)
    assert working.endswith(str(result))


@given(day, st.integers(1, 28))
def test_earlier(start, days):
    assert earlier(start, days)[1] == start - timedelta(days=days)


def test_working_names_the_length_of_the_month():
    assert later(date(2024, 2, 27), 4)[0] == (
        "27 + 4: 7+4=11, 2+1=3, so 31. February 2024 has 29 days. 31 - 29: 1-9=2".replace("1-9=2", "11-9=2, 2-2=0")
        + ", so 2. March 2: 2024-03-02"
    )


@given(day)
def test_days_in_month(start):
    length = days_in_month(start)
    assert start.replace(day=length).month == start.month
    assert (start.replace(day=length) + timedelta(days=1)).day == 1


@pytest.mark.parametrize(
    ("minutes", "full", "half"),
    [(0, "00:00", "12:00 am"), (65, "01:05", "1:05 am"), (720, "12:00", "12:00 pm"), (1439, "23:59", "11:59 pm")],
)
def test_clocks(minutes, full, half):
    assert (clock(minutes), half_day_clock(minutes)) == (full, half)
