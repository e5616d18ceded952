import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.synthetic.arithmetic import add, cents, choose, divide, subtract, times, total

number = st.integers(0, 9999)


@given(number, number)
def test_results(a, b):
    assert add(a, b)[1] == a + b
    assert subtract(max(a, b), min(a, b))[1] == abs(a - b)


@given(number, st.integers(1, 99))
def test_products(a, b):
    assert times(a, b)[1] == a * b


@given(number, st.integers(2, 9))
def test_quotients(a, b):
    assert divide(a, b)[1] == divmod(a, b)


@pytest.mark.parametrize(
    ("working", "expected"),
    [
        (add(3, 4), "3 + 4 = 7"),
        (add(47, 85), "47 + 85: 7+5=12, 4+8+1=13, so 132"),
        (add(995, 7), "995 + 7: 5+7=12, 9+1=10, 9+1=10, so 1002"),
        (subtract(52, 17), "52 - 17: 12-7=5, 4-1=3, so 35"),
        (subtract(100, 1), "100 - 1: 10-1=9, 9-0=9, 0-0=0, so 99"),
        (subtract(17, 5), "17 - 5: 7-5=2, 1-0=1, so 12"),
        (subtract(12, 7), "12 - 7 = 5"),
        (choose(46, 69, True), "46 or 69: < so 69"),
        (choose(46, 9, False), "46 or 9: > so 9"),
        (choose(10, 10, True), "10 or 10: = so 10"),
        (times(24, 7), "24 x 7: 4x7=28, 2x7+2=16, so 168"),
        (times(6, 60), "6 x 6 = 36, with 0 at the end 360"),
        (times(5, 1000), "5 x 1000 = 5000"),
        (times(12, 13), "12 x 10 = 120. 12 x 3: 2x3=6, 1x3=3, so 36. 120 + 36: 0+6=6, 2+3=5, 1=1, so 156"),
        (divide(136, 8), "136 / 8: 13/8=1 r 5, 56/8=7 r 0, so 17"),
        (divide(20, 3), "20 / 3: 20/3=6 r 2, so 6 r 2"),
    ],
)
def test_workings(working, expected):
    assert working[0] == expected


def test_total():
    assert total([1, 2, 30]) == ("1 + 2 = 3. 3 + 30: 3+0=3, 3=3, so 33", 33)


def test_cents():
    assert [cents(n) for n in (1350, 5, 100)] == ["13.50", "0.05", "1.00"]
