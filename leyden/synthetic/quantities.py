"""Unit and quantity arithmetic: conversions, stated ratios, totals, differences, shares, prices, comparisons.

With thinking the sum is written out, after a line that repeats the given numbers and says what is asked of them, so
that the kind of sum is settled before the sum; without, only sums that are one step long are asked.
"""

from leyden.synthetic.arithmetic import add, cents, choose, divide, subtract, times, total
from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import plural

# (larger unit, smaller unit, how many) - closed class: known in both splits
UNITS = (
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("kg", "g", 1000),
    ("l", "ml", 1000),
    ("t", "kg", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("dozen", "pieces", 12),
    ("GB", "MB", 1000),
    ("MB", "KB", 1000),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
    ("EUR", "cents", 100),
)


def convert(draw: Draw, thinking: bool) -> Example:
    """A known unit into a smaller or a larger one."""
    easy = [unit for unit in UNITS if unit[2] in (10, 100, 1000)]
    large, small, factor = draw.pick(UNITS if thinking else easy)
    number = draw.between(2, 99)
    fact = f"1 {large} = {factor} {small}"
    if draw.chance(0.6):
        working, result = times(number, factor)
        source, target, given = large, small, number
    else:
        working, result = _backwards(number, factor)
        source, target, given = small, large, number * factor
    text = draw.text("quantities.convert", number=given, source=source, target=target)
    return _answered(draw, thinking, text, f"{result} {target}", f"{given} {source} in {target}. {fact}. {working}")


def ratio(draw: Draw, thinking: bool) -> Example:
    """So many things in each of so many containers."""
    inside, count = (
        draw.between(2, 9) if not thinking else draw.between(2, 60),
        draw.between(2, 9 if not thinking else 40),
    )
    container, content = draw.word("container"), draw.word("content")
    working, result = times(inside, count)
    text = draw.text(
        "quantities.ratio",
        inside=inside,
        count=count,
        container=container,
        containers=plural(container),
        content=content,
    )
    return _answered(draw, thinking, text, f"{result} {content}", f"{count} times {inside} {content}. {working}")


def machine(draw: Draw, thinking: bool) -> Example:
    """A rate per minute or hour, asked over several of them."""
    rate, time = draw.between(2, 9 if not thinking else 90), draw.between(2, 9 if not thinking else 30)
    unit = draw.pick(("minute", "hour", "day"))
    machine_, made = draw.word("machine"), draw.word("made")
    working, result = times(rate, time)
    text = draw.text("quantities.rate", rate=rate, time=time, unit=unit, units=f"{unit}s", machine=machine_, made=made)
    return _answered(draw, thinking, text, f"{result} {made}", f"{time} times {rate} {made}. {working}")


def stock(draw: Draw, thinking: bool) -> Example:
    """Some are there, some come and some go."""
    top = 9 if not thinking else draw.pick((20, 99, 999))
    first, second = draw.between(2, top), draw.between(2, top)
    items, place = draw.word("content"), draw.pick((draw.word("city"), draw.word("company")))
    if draw.chance(0.5):
        working, result = add(first, second)
        working = f"{first} {items} and {second} more. {working}"
        text = draw.text("quantities.more", first=first, second=second, items=items, place=place)
    else:
        first, second = max(first, second), min(first, second)
        working, result = subtract(first, second)
        working = f"{first} {items}, {second} gone. {working}"
        text = draw.text("quantities.fewer", first=first, second=second, items=items, place=place)
    return _answered(draw, thinking, text, f"{result} {items}", working)


def share(draw: Draw, thinking: bool) -> Example:
    """Things dealt out evenly: how many each gets, or how many are left over."""
    people, each = draw.between(2, 9), draw.between(2, 9 if not thinking else 60)
    rest = draw.below(people) if thinking and draw.chance(0.5) else 0
    items, amount = draw.word("content"), people * each + rest
    working, (quotient, left) = divide(amount, people)
    slots = {"amount": amount, "people": people, "items": items}
    if rest:
        return _answered(
            draw,
            thinking,
            draw.text("quantities.left", **slots),
            f"{left} {items}",
            f"what is left of {amount} {items} for {people}. {working}",
        )
    return _answered(
        draw,
        thinking,
        draw.text("quantities.each", **slots),
        f"{quotient} {items}",
        f"what each of {people} gets of {amount} {items}. {working}",
    )


def price(draw: Draw, thinking: bool) -> Example:
    """What several pieces cost, or one line of a bill and another."""
    currency = draw.word("currency")
    first, second = draw.words("product", 2)
    if not thinking:
        count, each = draw.between(2, 9), draw.between(2, 9)
        text = draw.text(
            "quantities.price", count=count, each=each, product=first, products=plural(first), currency=currency
        )
        return _answered(draw, thinking, text, f"{count * each} {currency}", "")
    if draw.chance(0.5):
        count, each = draw.between(2, 9), draw.between(101, 4999)
        working, result = times(each, count)
        text = draw.text(
            "quantities.price", count=count, each=cents(each), product=first, products=plural(first), currency=currency
        )
        working = f"{count} at {cents(each)}. {cents(each)} is {each} cents. {working} cents = {cents(result)}"
        return _answered(draw, thinking, text, f"{cents(result)} {currency}", working)
    n1, n2, p1, p2 = draw.between(1, 6), draw.between(1, 6), draw.between(2, 60), draw.between(2, 60)
    (w1, a), (w2, b) = times(p1, n1), times(p2, n2)
    w3, result = add(a, b)
    lines = draw.text("quantities.bill", n1=n1, n2=n2, p1=p1, p2=p2, first=first, second=second, currency=currency)
    return _answered(draw, thinking, lines, f"{result} {currency}", f"{n1} at {p1} and {n2} at {p2}. {w1}. {w2}. {w3}")


def summed(draw: Draw, thinking: bool) -> Example:
    """A list of numbers with units added up."""
    people = draw.words("first_name", draw.pick((2, 3, 3, 4)) if thinking else 2)
    numbers = [draw.between(2, 99 if thinking else 9) for _ in people]
    unit = draw.pick(("km", "hours", "points", "EUR", "kg", "pages", "minutes"))
    working, result = total(numbers)
    lines = ", ".join(f"{name} {number} {unit}" for name, number in zip(people, numbers, strict=True))
    return _answered(
        draw, thinking, draw.text("quantities.sum", lines=lines, unit=unit), f"{result} {unit}", f"{lines}. {working}"
    )


def longer(draw: Draw, thinking: bool) -> Example:
    """Two amounts in different units: which one is more."""
    large, small, factor = draw.pick([unit for unit in UNITS if unit[2] <= 1000])
    number = draw.between(2, 12)
    a, b = draw.words("code_word", 2)
    working, result = times(number, factor)
    other = result
    while other == result:
        other = max(1, result + draw.between(-factor, factor))
    amounts = [(a, f"{number} {large}"), (b, f"{other} {small}")]
    if draw.chance(0.5):
        amounts.reverse()
    slots = {"a": amounts[0][0], "x": amounts[0][1], "b": amounts[1][0], "y": amounts[1][1]}
    winner = a if result > other else b
    given = ", ".join(f"{name} {amount}" for name, amount in amounts)
    compared, most = choose(result, other, True)
    working = f"which is more: {given}. 1 {large} = {factor} {small}. {working}. {compared}. {most} is {winner}"
    return _answered(draw, thinking, draw.text("quantities.compare", **slots), winner, working)


def _backwards(number: int, factor: int) -> tuple[str, int]:
    """How number x factor is divided by factor: zeros are struck; by 12, 24 or 60 in two steps that leave no rest."""
    amount = number * factor
    if factor in (10, 100, 1000):
        return f"{amount} / {factor} = {number}", number
    if factor < 10:
        return divide(amount, factor)[0], number
    first, second = {12: (3, 4), 24: (4, 6), 60: (10, 6)}[factor]
    between = amount // first
    step = f"{amount} / 10 = {between}" if first == 10 else divide(amount, first)[0]
    return f"{factor} is {first} x {second}. {step}. {divide(between, second)[0]}", number


def _answered(draw: Draw, thinking: bool, text: str, answer: str, working: str) -> Example:
    """An answer with a unit is also right without it."""
    number = answer.split()[0]
    return question(draw, thinking, text, [answer, number] if number != answer else answer, working)
