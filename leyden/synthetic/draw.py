"""Where every choice of an example comes from: one seeded stream, one split.

`Draw` answers two questions, which number comes next and which words may be used. The words and phrases live in
data/*.toml as `train` and `heldout` halves; a Draw sees only its own half (and the `shared` closed classes), so no
sampler can leak.
All choices are made from Random.random(), whose sequence Python keeps across versions.
"""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

INVENTED = 0.15  # share of open-class words that the train split makes up


@cache
def table(name: str) -> dict[str, Any]:
    """The parsed data/<name>.toml."""
    return tomllib.loads((Path(__file__).parent / "data" / f"{name}.toml").read_text(encoding="utf-8"))


@cache
def pool(name: str, split: Split) -> tuple[str, ...]:
    """The words of pool `name` that `split` may use."""
    entry = table("words")[name]
    return tuple(re.split(r",\s+", entry.get("shared") or entry[split]))


@cache
def phrases(name: str, split: Split) -> tuple[str, ...]:
    """The templates "section.key" of phrases.toml that `split` may use."""
    section, key = name.split(".")
    entry = table("phrases")[section][key]
    return tuple(entry.get("shared") or entry[split])


@cache
def heldout_words() -> frozenset[str]:
    """All held-out entries of words.toml, in lower case."""
    pools = (pool(name, "heldout") for name, entry in table("words").items() if "shared" not in entry)
    return frozenset(word.lower() for words in pools for word in words)


class Draw:
    """The choices of example `index` of `split` under `seed`; `templates` collects the ids of the phrases used."""

    def __init__(self, seed: int, index: int, split: Split):
        self._random = Random(f"{seed}/{split}/{index}").random
        self.split: Split = split
        self.templates: list[str] = []

    def unit(self) -> float:
        """A number in [0, 1)."""
        return self._random()

    def below(self, n: int) -> int:
        """A whole number in [0, n)."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return low + self.below(high - low + 1)

    def chance(self, p: float) -> bool:
        return self._random() < p

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], n: int) -> list[T]:
        """`n` different items in random order (all of them if there are fewer)."""
        left = list(items)
        for i in range(min(n, len(left))):
            j = i + self.below(len(left) - i)
            left[i], left[j] = left[j], left[i]
        return left[:n]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self.sample(items, len(items))

    def word(self, name: str) -> str:
        """A word of pool `name`; in training sometimes a made-up one, in the pool's capitalisation."""
        words = pool(name, self.split)
        if self.split == "train" and table("words")[name].get("invent") and self.chance(INVENTED):
            made = self.invent()
            return made.capitalize() if words[0][0].isupper() else made
        return self.pick(words)

    def words(self, name: str, n: int) -> list[str]:
        """`n` different words of pool `name`."""
        return self.sample(pool(name, self.split), n)

    def invent(self) -> str:
        """A pronounceable word that means nothing and is no held-out word."""
        syllables = (self.pick("bdfgklmnprstvz") + self.pick("aeiou") for _ in range(self.between(2, 3)))
        word = "".join(syllables) + self.pick(("", "n", "r", "s", "x"))
        return self.invent() if word in heldout_words() else word

    def text(self, name: str, /, **slots: object) -> str:
        """One template of phrases.toml, filled in."""
        choices = phrases(name, self.split)
        i = self.below(len(choices))
        self.templates.append(f"{name}/{self.split}/{i}")
        return self.fill(choices[i], **slots)

    def fill(self, template: str, /, **slots: object) -> str:
        """`template` with one alternative of every [a|b] and every {slot} replaced."""
        filled = ""
        for kind, part in _parts(template):
            match kind:
                case "text":
                    filled += part
                case "slot":
                    filled += _slot(part, slots)
                case "pick":
                    filled += self.fill(self.pick(part.split("|")), **slots)
        return filled


@cache
def _parts(template: str) -> tuple[tuple[str, str], ...]:
    """`template` as (kind, part): "text" as it is, "slot" for {name}, "pick" for [a|b]."""
    found = []
    for part in re.split(r"(\[[^\[\]]*\]|\{\w*\})", template):
        if part.startswith("["):
            found.append(("pick", part[1:-1]))
        elif part.startswith("{"):
            found.append(("slot", part[1:-1]))
        elif part:
            found.append(("text", part))
    return tuple(found)


def _slot(name: str, slots: dict[str, object]) -> str:
    """The value of {name}; {Name} is the same value with a capital first letter."""
    if name in slots:
        return str(slots[name])
    text = str(slots[name[0].lower() + name[1:]])
    return text[0].upper() + text[1:]
