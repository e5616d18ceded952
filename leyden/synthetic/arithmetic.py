"""Sums worked out in writing, digit by digit, the way a small model can follow: each function gives (working, result).

The working is always the same for the same numbers, so that one procedure is learnt once and used by every family.
"""


def add(a: int, b: int) -> tuple[str, int]:
    """a + b, column by column from the right with carries: "47 + 85: 7+5=12, 4+8+1=13, so 132"."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}", a + b
    steps, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        digits = [d for d in (_digit(a, i), _digit(b, i)) if d is not None]
        terms = digits + [carry] if carry else digits
        total = sum(terms)
        steps.append(f"{'+'.join(map(str, terms))}={total}")
        carry = total // 10
    return f"{a} + {b}: {', '.join(steps)}, so {a + b}", a + b


def subtract(a: int, b: int) -> tuple[str, int]:
    """a - b for a >= b: a column that is too small takes ten and the next one pays: "52 - 17: 12-7=5, 4-1=3, so 35"."""
    if b < 10 and a - b < 10:
        return f"{a} - {b} = {a - b}", a - b
    steps, borrow = [], 0
    for i in range(len(str(a))):
        top, bottom = (_digit(a, i) or 0) - borrow, _digit(b, i) or 0
        borrow = int(top < bottom)
        steps.append(f"{top + 10 * borrow}-{bottom}={top + 10 * borrow - bottom}")
    return f"{a} - {b}: {', '.join(steps)}, so {a - b}", a - b


def times(a: int, b: int) -> tuple[str, int]:
    """a x b; b of two digits is split into tens and ones, trailing zeros are put back at the end."""
    if b % 10 == 0 and b:
        zeros = len(str(b)) - len(str(b).rstrip("0"))
        head = b // 10**zeros
        if head == 1:
            return f"{a} x {b} = {a * b}", a * b
        return (
            f"{_times_digit(a, head) if head < 10 else times(a, head)[0]}, with {'0' * zeros} at the end {a * b}",
            a * b,
        )
    if b < 10:
        return _times_digit(a, b), a * b
    tens, ones = b // 10 * 10, b % 10
    return f"{times(a, tens)[0]}. {_times_digit(a, ones)}. {add(a * tens, a * ones)[0]}", a * b


def divide(a: int, b: int) -> tuple[str, tuple[int, int]]:
    """a / b for one-digit b as long division: "136 / 8: 13/8=1 r 5, 56/8=7 r 0, so 17"; result (quotient, rest)."""
    steps: list[str] = []
    rest = 0
    for digit in map(int, str(a)):
        part = rest * 10 + digit
        rest = part % b
        if part >= b or steps:
            steps.append(f"{part}/{b}={part // b} r {rest}")
    return f"{a} / {b}: {', '.join(steps)}, so {a // b}" + (f" r {a % b}" if a % b else ""), (a // b, a % b)


def choose(a: int, b: int, largest: bool) -> tuple[str, int]:
    """The larger or the smaller of two numbers, by the sign that stands between them: "46 or 69: < so 69"."""
    sign = ">" if a > b else "<" if a < b else "="
    best = max(a, b) if largest else min(a, b)
    return f"{a} or {b}: {sign} so {best}", best


def total(numbers: list[int]) -> tuple[str, int]:
    """The sum of several numbers, added one after the other."""
    steps, result = [], numbers[0]
    for number in numbers[1:]:
        working, result = add(result, number)
        steps.append(working)
    return ". ".join(steps), result


def cents(amount: int) -> str:
    """Cents as an amount with two decimals: 1350 -> "13.50"."""
    return f"{amount // 100}.{amount % 100:02}"


def _digit(n: int, place: int) -> int | None:
    text = str(n)
    return int(text[-1 - place]) if place < len(text) else None


def _times_digit(a: int, b: int) -> str:
    if a < 10:
        return f"{a} x {b} = {a * b}"
    steps, carry = [], 0
    for digit in map(int, reversed(str(a))):
        product = digit * b + carry
        steps.append(f"{digit}x{b}{f'+{carry}' if carry else ''}={product}")
        carry = product // 10
    return f"{a} x {b}: {', '.join(steps)}, so {a * b}"
