"""Dates, weekdays and clock times: shifting them, the distance between them, and writing them another way."""

from datetime import timedelta

from leyden.synthetic import calendar
from leyden.synthetic.arithmetic import add, divide, subtract, total
from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw


def shift(draw: Draw, thinking: bool) -> Example:
    """A date some days or weeks later or earlier. Always an ISO date; without thinking the month does not change."""
    day = calendar.some_date(draw)
    if not thinking:
        day = day.replace(day=draw.between(1, 20))
        days = draw.between(1, 8)
        after = draw.chance(0.5) or days >= day.day
        result, working, said = day + timedelta(days=days if after else -days), "", f"{days} days"
        return _dated(draw, thinking, after, day, said, str(result), working)
    weeks = draw.chance(0.25)
    days = 7 * draw.between(1, 4) if weeks else draw.between(1, 45)
    said = (
        f"{days // 7} weeks" if weeks and days > 7 else "1 week" if weeks else f"{days} days" if days > 1 else "1 day"
    )
    after = draw.chance(0.6) or days > 28
    working, result = calendar.later(day, days) if after else calendar.earlier(day, days)
    if weeks:
        working = f"{said} = {days} days. {working}"
    working = f"{day} {'plus' if after else 'minus'} {said}, the month is {calendar.MONTHS[day.month - 1]}. {working}"
    return _dated(draw, thinking, after, day, said, str(result), working)


def distance(draw: Draw, thinking: bool) -> Example:
    """Days from one date to another in the same month or the next one."""
    first = calendar.some_date(draw)
    length = calendar.days_in_month(first)
    if not thinking or draw.chance(0.4):
        start, end = sorted(draw.sample(range(1, 10 if not thinking else length + 1), 2))
        first, second = first.replace(day=start), first.replace(day=end)
        working, days = subtract(end, start)
    else:
        second = (first.replace(day=28) + timedelta(days=4)).replace(day=draw.between(1, 28))
        rest, left = subtract(length, first.day)
        working, days = add(left, second.day)
        year = f" {first.year}" if first.month == 2 else ""
        working = f"{calendar.MONTHS[first.month - 1]}{year} has {length} days. {rest}. {working}"
    working = f"from {first} to {second}. {working}"
    text = draw.text("days.distance", first=first, second=second)
    return question(draw, thinking, text, [f"{days} days" if days != 1 else "1 day", str(days)], working)


def weekday(draw: Draw, thinking: bool) -> Example:
    """The weekday some days after or before another; the days are counted off."""
    start, days = draw.below(7), draw.between(1, 6 if not thinking else 30)
    after = draw.chance(0.7)
    result = calendar.WEEKDAYS[(start + (days if after else -days)) % 7]
    rest = days % 7
    steps = [f"{calendar.WEEKDAYS[start]} {'plus' if after else 'minus'} {days} days"]
    steps += [f"{days} / 7 = {days // 7} r {rest}"] if days >= 7 else []
    step = 1 if after else -1
    counted = [calendar.WEEKDAYS[(start + step * i) % 7] for i in range(rest + 1)]
    steps.append(", ".join(f"{name} {i}" for i, name in enumerate(counted)))
    text = draw.text(
        f"days.weekday_{'after' if after else 'before'}",
        weekday=calendar.WEEKDAYS[start],
        days=f"{days} days" if days > 1 else "1 day",
    )
    return question(draw, thinking, text, result, ". ".join(steps))


def clock_end(draw: Draw, thinking: bool) -> Example:
    """When something ends that starts at a time and takes so long."""
    start = draw.between(6, 20) * 60 + 5 * draw.below(12)
    hours, minutes = draw.between(0, 3), 5 * draw.below(12)
    if not thinking:
        start, minutes = start // 60 * 60, 5 * draw.between(1, 11)
    minutes = minutes or (15 if not hours else 0)
    hour, minute = divmod(start, 60)
    said = (
        f"{hours} hours and {minutes} minutes"
        if hours and minutes
        else f"{hours} hours"
        if hours
        else f"{minutes} minutes"
    )
    said = said.replace("1 hours", "1 hour")
    working, together = add(minute, minutes)
    carry = together // 60
    if carry:
        working += f". {subtract(together, 60)[0]}"
    steps, end = total([hour, hours, carry] if carry else [hour, hours])
    working += f". {steps}" + (f". {subtract(end, 24)[0]}" if end >= 24 else "")
    answer = calendar.clock(start + hours * 60 + minutes)
    text = draw.text("days.end", event=draw.word("event"), start=calendar.clock(start), length=said)
    return question(draw, thinking, text, answer, f"{calendar.clock(start)} plus {said}. {working}. {answer}")


def clock_length(draw: Draw, thinking: bool) -> Example:
    """How many minutes lie between two clock times of one day, less than five hours apart."""
    start = draw.between(6, 17) * 60 + 5 * draw.below(12)
    length = 5 * draw.between(2, 50)
    if not thinking:
        start, length = start // 60 * 60, 5 * draw.between(1, 11)
    end = start + length
    working, hours = subtract(end // 60, start // 60)
    steps, minutes = [working, f"{hours} hours = {60 * hours} minutes"], 60 * hours
    if end % 60:
        working, minutes = add(minutes, end % 60)
        steps.append(working)
    if start % 60:
        working, minutes = subtract(minutes, start % 60)
        steps.append(working)
    text = draw.text("days.length", event=draw.word("event"), start=calendar.clock(start), end=calendar.clock(end))
    working = ". ".join([f"from {calendar.clock(start)} to {calendar.clock(end)}", *steps])
    return question(draw, thinking, text, [f"{minutes} minutes", str(minutes)], working)


def rewrite(draw: Draw, thinking: bool) -> Example:
    """A date in words as YYYY-MM-DD, or a time of the 12-hour clock as HH:MM."""
    if draw.chance(0.5):
        day = calendar.some_date(draw)
        said = calendar.long_form(draw, day)
        return question(draw, thinking, draw.text("days.iso", said=said), str(day), calendar.iso_working(said, day))
    minutes = draw.between(60, 22 * 60 + 55)
    said, answer = calendar.half_day_clock(minutes), calendar.clock(minutes)
    return question(draw, thinking, draw.text("days.clock", said=said), answer, calendar.clock_working(minutes))


def in_weeks(draw: Draw, thinking: bool) -> Example:
    """Days as weeks and days."""
    days = draw.between(8, 60 if thinking else 20)
    working, (weeks, rest) = divide(days, 7)
    answer = f"{weeks} weeks and {rest} days"
    singular = answer.replace("1 weeks", "1 week").replace(" 1 days", " 1 day")
    return question(draw, thinking, draw.text("days.weeks", days=days), [answer, singular], working)


def _dated(draw: Draw, thinking: bool, after: bool, day: object, said: str, answer: str, working: str) -> Example:
    text = draw.text(f"days.{'after' if after else 'before'}", day=day, days=said)
    return question(draw, thinking, text, answer, working)
