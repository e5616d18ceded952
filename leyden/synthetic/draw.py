"""Where every choice of an example comes from: one seeded stream, one split.

`Draw` answers two questions, which number comes next and which words may be used. The words and phrases live in
data/*.toml as `train` and `heldout` halves; a Draw sees only its own half (and the `shared` closed classes), so no
sampler can leak.
All choices are made from Random.random(), whose sequence Python keeps across versions.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

from leyden.synthetic.vary import EMBEDDED, framed, reworded

T = TypeVar("T")
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")

# Shares of open-class words that the train split makes up; each example draws one. A small model learns by heart what
# it can; what it is to learn is to copy, and a word that was never seen before and never comes again can only be
# copied. Real words show the pieces of the vocabulary in the order in which they occur in English.
INVENTED = (0.0, 0.4, 0.6, 0.7, 0.8, 1.0)
_PREFIXES = ("anti", "auto", "bi", "co", "counter", "cross", "de", "dis", "down", "ex", "fore", "hyper", "in",
             "inter", "macro", "mega", "micro", "mid", "mis", "multi", "non", "out", "over", "photo", "poly",
             "post", "pre", "pro", "re", "semi", "sub", "super", "sur", "tele", "therm", "trans", "tri", "ultra",
             "un", "under", "up", "with")  # fmt: skip
_SUFFIXES = ("able", "age", "al", "ance", "ant", "ation", "berg", "burg", "dom", "ed", "ence", "er", "ery",
             "ette", "ford", "ful", "graph", "hood", "ia", "ian", "ible", "ic", "ier", "ify", "ing", "ion", "ish",
             "ism", "ist", "ity", "ive", "ize", "less", "let", "ling", "logy", "ment", "meter", "ness", "or",
             "ous", "scope", "sen", "ship", "sion", "some", "son", "stone", "ton", "tory", "ture", "ville",
             "ward", "wood", "work", "worth", "y")  # fmt: skip
_ONSETS = (
    *(
        "b",
        "bl",
        "br",
        "c",
        "ch",
        "cl",
        "cr",
        "d",
        "dr",
        "f",
        "fl",
        "fr",
        "g",
        "gl",
        "gr",
        "h",
        "j",
        "k",
        "l",
        "m",
        "n",
    ),
    *(
        "p",
        "ph",
        "pl",
        "pr",
        "qu",
        "r",
        "s",
        "sc",
        "sh",
        "sk",
        "sl",
        "sm",
        "sn",
        "sp",
        "st",
        "str",
        "sw",
        "t",
        "th",
        "tr",
    ),
    *("v", "w", "z"),
)
_VOWELS = ("a", "a", "e", "e", "i", "i", "o", "o", "u", "ai", "ay", "ea", "ee", "ie", "oa", "oo", "ou", "y")
_CODAS = (
    *("", "", "", "b", "ck", "d", "f", "ft", "g", "l", "ld", "ll", "lm", "lt", "m", "mp", "n", "nd", "ng", "nk", "nt"),
    *("p", "r", "rd", "rk", "rm", "rn", "rt", "s", "sh", "sk", "ss", "st", "t", "th", "tt", "x"),
)


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


@cache
def _known() -> tuple[str, ...]:
    """All words of the train split, in lower case."""
    pools = (pool(name, "train") for name in table("words"))
    return tuple(sorted({part for words in pools for word in words for part in re.findall(r"[a-z]{4,}", word.lower())}))


@cache
def _spoken() -> tuple[str, ...]:
    """The words of the train split's phrases, in lower case: pieces of the vocabulary that no value would have."""

    def lines(entry: Any) -> Iterator[str]:
        for key, value in entry.items() if isinstance(entry, dict) else enumerate(entry):
            if key != "heldout":
                yield from [value] if isinstance(value, str) else lines(value)

    texts = (re.sub(r"\{\W?\w+\}", " ", line) for name in ("phrases", "parts") for line in lines(table(name)))
    return tuple(sorted({word for text in texts for word in re.findall(r"\b[a-z]{3,9}\b", text.lower())} - _unwanted()))


@cache
def _modifiers() -> tuple[str, ...]:
    """Words of the train split that can stand before a noun."""
    pools = (pool(name, "train") for name in ("noun", "product", "topic", "machine", "event", "field_text", "tag"))
    return tuple(sorted({word for words in pools for word in words if word.isalpha()}))


@cache
def _unwanted() -> frozenset[str]:
    """Words that no made-up one may be: held-out ones, and those that say something to the tasks."""
    heldout = {part for word in heldout_words() for part in re.findall(r"[a-z]+", word)}
    return frozenset(heldout) | {
        "true",
        "false",
        "none",
        "null",
        "not",
        "and",
        "the",
        "for",
        "with",
        "tool",
        "yes",
    }


class Draw:
    """The choices of example `index` of `split` under `seed`; `templates` collects the ids of the phrases used."""

    def __init__(self, seed: int, index: int, split: Split):
        self._random = Random(f"{seed}/{split}/{index}").random
        self.split: Split = split
        self.templates: list[str] = []
        self.invented = self.pick(INVENTED) if split == "train" else 0.0

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
        """A word of pool `name`; in training often a made-up one, written like those of the pool."""
        return self._disguised(name, self.pick(pool(name, self.split)))

    def words(self, name: str, n: int) -> list[str]:
        """`n` different words of pool `name`, made up as in `word`."""
        found = [self._disguised(name, word) for word in self.sample(pool(name, self.split), n)]
        return found if len(set(found)) == len(found) else self.words(name, n)

    def unseen(self, p: float) -> bool:
        """True with probability `p` in training, never held out (and without a draw): for what only training has."""
        return self.split == "train" and self.chance(p)

    def _disguised(self, name: str, word: str) -> str:
        """`word`, in training with a word before it where the pool has `compound`, or in its place one that nobody has
        seen: as many parts, separated and capitalised as they are, and sometimes one of them left as it is."""
        entry = table("words")[name]
        if entry.get("compound") and self.unseen(0.2) and word.isalpha():
            longer = f"{self.pick(_modifiers())} {word}"
            word = word if longer in heldout_words() else longer
        if not entry.get("invent") or not self.unseen(self.invented):
            return word
        keep = 0.25 if " " in word or "_" in word else 0.0

        def made(part: re.Match[str]) -> str:
            if keep and self.chance(keep):
                return part[0]
            new = self.invent()
            if part[0].isupper() and len(part[0]) > 1:
                return new.upper()
            if name == "last_name" and self.chance(0.1):
                return self.pick(("Mc", "Mac", "De", "Le", "Van", "Fitz")) + new.capitalize()
            return new.capitalize() if part[0][0].isupper() else new

        return re.sub(r"[A-Za-z]+", made, word)

    def invent(self) -> str:
        """A word that means nothing: of syllables, of halves of two words, of a prefix, a stem and a suffix, of a word
        of the phrases and something after or before it, or of any letters. No held-out word, nor one that begins like
        a short one (ids are cut from the front of words)."""
        match self.pick("ssshhhnnnwwwwwl"):
            case "s":
                count = self.pick((1, 2, 2, 2, 3))
                parts = (self.pick(_ONSETS) + self.pick(_VOWELS) + self.pick(_CODAS) for _ in range(count))
                word = "".join(parts)
            case "h":
                first, second = self.pick(_known()), self.pick(_known())
                word = first[: self.between(2, 5)] + second[-self.between(2, 5) :]
            case "n":
                stem = self.pick(_known())[: self.between(3, 6)]
                word = self.pick(("", "", self.pick(_PREFIXES))) + stem + self.pick(("", *self.sample(_SUFFIXES, 2)))
            case "w":
                spoken, end = self.pick(_spoken()), self.pick(_known())[-self.between(2, 5) :]
                word = self.pick(
                    (spoken + self.pick(_SUFFIXES), spoken + end, self.pick(_PREFIXES) + spoken, end + spoken)
                )
            case _:
                word = "".join(self.pick("abcdefghijklmnopqrstuvwxyz") for _ in range(self.between(3, 8)))
        word = word[:14]
        beginnings = {word, word[:3], word[:4], word[:-1], f"{word}s"}
        return self.invent() if len(word) < 3 or not beginnings.isdisjoint(_unwanted()) else word

    def text(self, name: str, /, **slots: object) -> str:
        """One template of phrases.toml, filled in; in training reworded and framed (`leyden.synthetic.vary`)."""
        choices = phrases(name, self.split)
        i = self.below(len(choices))
        self.templates.append(f"{name}/{self.split}/{i}")
        template = self.alternative(choices[i])
        if self.split == "train":
            template = reworded(self, template)
            if name not in EMBEDDED:
                template = framed(self, template)
        return _filled(template, slots)

    def fill(self, template: str, /, **slots: object) -> str:
        """`template` with one alternative of every [a|b] and every {slot} replaced."""
        return _filled(self.alternative(template), slots)

    def alternative(self, template: str) -> str:
        """`template` with one alternative of every [a|b], which may be nested, and of every {@part} of parts.toml."""
        while _PART.search(template) or _CHOICE.search(template):
            template = _PART.sub(lambda part: self.pick(part_choices(part[1])), template)
            template = _CHOICE.sub(lambda choice: self.pick(choice[1].split("|")), template)
        return template


@cache
def part_choices(name: str) -> tuple[str, ...]:
    """The forms of the part `name` of training phrases; {@Name} begins with a capital letter."""
    parts = table("parts")
    if name in parts:
        return tuple(parts[name])
    return tuple(form[:1].upper() + form[1:] for form in parts[name[0].lower() + name[1:]])


def _filled(template: str, slots: dict[str, object]) -> str:
    return _SLOT.sub(lambda slot: _slot(slot[1], slots), template)


_PART = re.compile(r"\{@(\w+)\}")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


def _slot(name: str, slots: dict[str, object]) -> str:
    """The value of {name}; {Name} is the same value with a capital first letter."""
    if name in slots:
        return str(slots[name])
    text = str(slots[name[0].lower() + name[1:]])
    return text[0].upper() + text[1:]
