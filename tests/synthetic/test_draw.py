import json
import re
from itertools import combinations

import pytest

from leyden.synthetic import generate
from leyden.synthetic.draw import Draw, heldout_words, part_choices, phrases, pool, table

PHRASES = [f"{section}.{key}" for section, keys in table("phrases").items() for key in keys]
SPLIT_POOLS = [name for name, entry in table("words").items() if "shared" not in entry]


@pytest.mark.parametrize("name", PHRASES)
def test_templates_of_the_splits_differ(name):
    train, heldout = phrases(name, "train"), phrases(name, "heldout")
    assert train and heldout and not set(train) & set(heldout)


@pytest.mark.parametrize("name", PHRASES)
def test_templates_of_both_splits_use_the_same_slots(name):
    slots = [
        {slot.lower() for slot in re.findall(r"\{(\w+)\}", template)}
        for split in ("train", "heldout")
        for template in phrases(name, split)
    ]
    # a template may leave a slot out (the persona lines do), but a slot that only held-out templates have is an error
    train = set().union(*slots[: len(phrases(name, "train"))])
    assert set().union(*slots) == train


def test_no_alternative_of_a_training_template_is_a_heldout_one():
    """Nothing that [a|b] and {@part} can give is held out, case, blanks and punctuation aside."""
    places = [(phrases(name, "train"), phrases(name, "heldout")) for name in PHRASES]
    places += [(entry["train"], entry["heldout"]) for entries in table("about").values() for entry in entries]
    found = []
    for train, heldout in places:
        forbidden = [bare(template) for template in heldout]
        found += [t for t in train for text in forbidden if re.fullmatch(alternatives(t), text)]
    assert found == []


def bare(template):
    return "".join(re.findall(r'[a-z0-9{}<>"]', template.lower()))


def alternatives(template):
    """A regular expression for every `bare` alternative of a template."""
    while parts := re.search(r"\{@(\w+)\}", template):
        template = f"{template[: parts.start()]}[{'|'.join(part_choices(parts[1]))}]{template[parts.end() :]}"
    depth, pattern = 0, ""
    for char in template:
        depth += (char == "[") - (char == "]")
        signs = {"[": "(?:", "]": ")", "|": "|" if depth else ""}
        pattern += signs[char] if char in signs else re.escape(bare(char))
    return pattern


def test_alternatives_cover_what_is_drawn():
    draw = Draw(0, 0, "train")
    for name in PHRASES:
        for template in phrases(name, "train"):
            assert re.fullmatch(alternatives(template), bare(draw.alternative(template)))


def test_heldout_templates_are_plain():
    for name in PHRASES:
        assert not any("[" in template or "{@" in template for template in phrases(name, "heldout"))


@pytest.mark.parametrize("name", PHRASES)
def test_training_has_many_wordings(name):
    draw = Draw(0, 0, "train")
    assert len({draw.text(name, **SLOTS) for _ in range(200)}) >= 25


SLOTS = {
    slot: f"<{slot}>" for slot in re.findall(r"\{(\w+)\}", " ".join(t for n in PHRASES for t in phrases(n, "train")))
}
SLOTS |= {slot[0].lower() + slot[1:]: f"<{slot}>" for slot in SLOTS}


def test_fill_takes_alternatives_within_alternatives():
    draw = Draw(0, 0, "train")
    assert {draw.fill("[a|[b|c[d|]]] e") for _ in range(90)} == {"a e", "b e", "cd e", "c e"}


def test_fill_takes_a_form_of_a_part():
    draw = Draw(0, 0, "train")
    texts = {draw.fill("{@Give} it") for _ in range(300)}
    assert "Return it" in texts and len(texts) > 15


def test_alternatives_of_values_are_left_alone():
    assert Draw(0, 0, "train").fill("{x}", x="[a|b] {y} {@give}") == "[a|b] {y} {@give}"


def test_vocabularies_of_the_splits_differ():
    train = {word.lower() for name in SPLIT_POOLS for word in pool(name, "train")}
    assert not train & heldout_words()


@pytest.mark.parametrize("name", SPLIT_POOLS)
def test_pools_have_no_doubles(name):
    for split in ("train", "heldout"):
        words = pool(name, split)
        assert len(words) == len(set(words)) >= 3


def test_questions_about_leyden_differ_between_the_splits():
    about = table("about")
    train = {text.lower().rstrip("?.!") for entries in about.values() for entry in entries for text in entry["train"]}
    heldout = {
        text.lower().rstrip("?.!") for entries in about.values() for entry in entries for text in entry["heldout"]
    }
    assert len(heldout) > 80 and not train & heldout


def test_answers_about_leyden_hold_their_keys():
    for entries in table("about").values():
        for entry in entries:
            assert all(key in entry["answer"] for key in entry["keys"]), entry


def test_tools_of_the_splits_differ():
    tools = table("tools")["tool"]
    names = [[tool["name"] for tool in tools if tool.get("heldout", False) is heldout] for heldout in (False, True)]
    assert len(names[0]) > 40 and len(names[1]) > 12
    assert len(set(names[0] + names[1])) == len(tools)
    for action in table("tools")["action"]:
        assert not set(action["ask"]) & set(action["heldout"])


def test_documents_and_labels_of_the_splits_differ():
    for document in table("documents")["document"]:
        assert not set(document["train"]) & set(document["heldout"])
    cues = {split: set() for split in ("train", "heldout")}
    for each in table("labels")["set"]:
        cues[each["split"]] |= {cue for words in each["labels"].values() for cue in words.split(", ")} | set(
            each["labels"]
        )
    assert not cues["train"] & cues["heldout"]


def test_cues_of_one_set_of_labels_are_unambiguous():
    for each in table("labels")["set"]:
        for a, b in combinations(each["labels"].values(), 2):
            assert not set(a.split(", ")) & set(b.split(", "))


def test_heldout_words_never_occur_in_training():
    """Whole words and phrases, in any spelling of code (snake_case, camelCase, paths, plurals of nouns)."""
    spaced = re.sub(r"[^A-Za-z0-9]+", " ", " ".join(json.dumps([e["messages"], e["tools"]]) for e in generate(9, 4000)))
    spaced = f" {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', spaced).lower()} "
    wanted = {re.sub(r"[^a-z0-9]+", " ", word) for word in heldout_words()}
    wanted |= {f"{word}s" for word in pool("noun", "heldout")}
    assert [word for word in wanted if f" {word} " in spaced] == []


def test_training_makes_words_up_and_heldout_does_not():
    known = {split: set(pool("city", split)) for split in ("train", "heldout")}
    drawn = {split: {Draw(0, i, split).word("city") for i in range(400)} for split in ("train", "heldout")}
    assert len(drawn["train"] - known["train"]) > 20
    assert drawn["heldout"] <= known["heldout"]


def test_sample_gives_different_items():
    draw = Draw(0, 0, "train")
    assert sorted(draw.shuffled(range(9))) == list(range(9))
    assert len(set(draw.sample(range(9), 4))) == 4
    assert len(draw.sample("abc", 7)) == 3


def test_fill_replaces_slots_and_alternatives():
    draw = Draw(0, 0, "train")
    texts = {draw.fill("[Hi|Hello] {name}, {Name}[| again]", name="ann") for _ in range(60)}
    assert texts == {f"{hello} ann, Ann{end}" for hello in ("Hi", "Hello") for end in ("", " again")}


def test_examples_differ_in_how_much_is_made_up():
    known = set(pool("code_word", "train"))
    shares = {sum(word not in known for word in Draw(0, i, "train").words("code_word", 20)) / 20 for i in range(60)}
    assert {0.0, 1.0} <= shares and len(shares) > 8


def test_made_up_words_are_words_and_none_is_held_out():
    draw = Draw(0, 1, "train")
    words = [draw.invent() for _ in range(5000)]
    assert all(re.fullmatch("[a-z]{3,14}", word) for word in words)
    assert not heldout_words() & {form for word in words for form in (word, f"{word}s", word[:3], word[:4])}


def test_nouns_of_two_words_occur_in_training():
    drawn = {Draw(0, i, "train").word("noun") for i in range(300)} - set(pool("noun", "train"))
    assert sum(" " in word for word in drawn) > 30
