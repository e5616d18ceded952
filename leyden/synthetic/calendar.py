"""Dates and clock times: how they are written, and steps of date arithmetic worked out in writing."""

from datetime import date, timedelta

from leyden.synthetic.arithmetic import add, subtract
from leyden.synthetic.draw import Draw

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def some_date(draw: Draw) -> date:
    """A day of 2020 to 2031."""
    return date(2020, 1, 1) + timedelta(days=draw.below(4380))


def long_form(draw: Draw, day: date) -> str:
    """The day in words: "14 March 2025" or "March 14, 2025"."""
    month = MONTHS[day.month - 1]
    return draw.pick((f"{day.day} {month} {day.year}", f"{month} {day.day}, {day.year}"))


def iso_working(said: str, day: date) -> str:
    """How a day in words becomes YYYY-MM-DD."""
    return f"{said}: {MONTHS[day.month - 1]} is {day.month:02}, so {day}"


def days_in_month(day: date) -> int:
    return ((day.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=1)).day


def later(day: date, days: int) -> tuple[str, date]:
    """`days` after `day`, month by month: the length of the month is taken off until the rest fits."""
    working, number = add(day.day, days)
    steps, first = [working], day.replace(day=1)
    while number > (length := days_in_month(first)):
        steps.append(f"{MONTHS[first.month - 1]}{f' {first.year}' if first.month == 2 else ''} has {length} days")
        working, number = subtract(number, length)
        steps.append(working)
        first = (first.replace(day=28) + timedelta(days=4)).replace(day=1)
    result = first.replace(day=number)
    return f"{'. '.join(steps)}. {MONTHS[result.month - 1]} {number}: {result}", result


def earlier(day: date, days: int) -> tuple[str, date]:
    """`days` before `day`, for days <= 28: the month before is borrowed from if needed."""
    if days < day.day:
        working, number = subtract(day.day, days)
        result = day.replace(day=number)
        return f"{working}. {MONTHS[result.month - 1]} {number}: {result}", result
    before = day.replace(day=1) - timedelta(days=1)
    plus, together = add(day.day, before.day)
    minus, number = subtract(together, days)
    result = before.replace(day=number)
    year = f" {before.year}" if before.month == 2 else ""
    month = MONTHS[before.month - 1]
    return f"{month}{year} has {before.day} days. {plus}. {minus}. {month} {number}: {result}", result


def clock(minutes: int) -> str:
    """Minutes after midnight as HH:MM; a day later starts again at 00:00."""
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def clock_working(minutes: int) -> str:
    """How a time of the 12-hour clock becomes HH:MM; none of the hour after midnight."""
    hour, said = minutes // 60, half_day_clock(minutes)
    if hour < 12:
        return f"{said}: am, the hour stays {hour:02}, so {clock(minutes)}"
    if hour == 12:
        return f"{said}: 12 pm, the hour stays 12, so {clock(minutes)}"
    return f"{said}: pm, {hour - 12} + 12 = {hour}, so {clock(minutes)}"


def half_day_clock(minutes: int) -> str:
    """Minutes after midnight as 3:05 pm."""
    hour = minutes // 60
    return f"{(hour - 1) % 12 + 1}:{minutes % 60:02} {'am' if hour < 12 else 'pm'}"
