"""Answers that do nothing but repeat themselves: found on the host, when a token is committed. No torch."""

from leyden.types import Repetition


def repeats(tokens: list[int], start: int, rule: Repetition | None) -> bool:
    """Whether tokens[start:] ends in one pattern of a length that `rule` names, rule.min_count times in a row."""
    if rule is None:
        return False
    end, count = len(tokens), rule.min_count
    for size in range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1):
        first = end - size * count
        if first < start:
            return False
        # Nearly always the last token tells already; else: equal to itself, moved by one pattern.
        if tokens[-1] == tokens[-1 - size] and tokens[first : end - size] == tokens[first + size :]:
            return True
    return False
