"""Short classification: labels with their words, good or bad, a rule with a limit, a list that has something or not."""

from leyden.synthetic.arithmetic import choose
from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import with_articles


def labels(draw: Draw, thinking: bool) -> Example:
    """A message and labels, each with the words that belong to it."""
    chosen = _some_labels(draw)
    names = draw.sample(list(chosen), draw.between(2, len(chosen)))
    label = draw.pick(names)
    cue = draw.pick(chosen[label].split(", "))
    forms = ("- {}: {}", "- {}: {}", "{}: {}", "{} = {}", "* {} ({})", "{} - {}")
    form = draw.pick(forms) if draw.split == "train" else forms[0]
    lines = "\n".join(form.format(name, chosen[name]) for name in names)
    text = draw.text("classify.message", cue=cue, city=draw.word("city"), name=draw.word("first_name"))
    prompt = draw.text("classify.labels", labels=lines, names=", ".join(names), text=text)
    tried = []
    for name in names[: names.index(label) + 1]:
        words = chosen[name].split(", ")
        words = words[: words.index(cue) + 1] if name == label else words
        marks = [f"{word} {'yes' if word == cue else 'no'}" for word in words]
        tried.append(f"{name}: {', '.join(marks)}")
    return question(draw, thinking, prompt, label, "\n".join([f"wanted {cue}", *tried, f"{cue} is {label}"]))


def _some_labels(draw: Draw) -> dict[str, str]:
    """Label -> its words; in training often any words at all, so that the list has to be read."""
    if draw.split == "train" and draw.chance(0.5):
        words = draw.words(draw.pick(("product", "food", "service", "code_word", "tag")), draw.between(6, 12))
        names = draw.words(draw.pick(("tag", "topic", "code_word", "column")), draw.between(2, 4))
        if not set(words) & set(names):
            return {name: ", ".join(words[i :: len(names)]) for i, name in enumerate(names)}
    sets = [each for each in table("labels")["set"] if each["split"] == draw.split]
    labels: dict[str, str] = draw.pick(sets)["labels"]
    return labels


def sentiment(draw: Draw, thinking: bool) -> Example:
    """A review: positive, negative or neutral, by its adjective."""
    names = draw.pick((("positive", "negative", "neutral"), ("good", "bad", "mixed"), ("happy", "unhappy", "neutral")))
    mood = draw.below(3 if draw.chance(0.7) else 2)
    word = draw.word(("sentiment_good", "sentiment_bad", "sentiment_flat")[mood])
    offered = names if mood == 2 else draw.pick((names, names[:2]))
    text = with_articles(draw.text("classify.review", product=draw.word("product"), part=draw.word("part"), word=word))
    prompt = draw.text("classify.sentiment", names=", ".join(draw.shuffled(offered)), text=text)
    return question(draw, thinking, prompt, names[mood], f"{word} is {names[mood]}")


def limit(draw: Draw, thinking: bool) -> Example:
    """A rule with a number: one label above the limit, another one otherwise."""
    made = draw.split == "train" and draw.chance(0.5)
    above, otherwise = (
        draw.words(draw.pick(("status", "tag", "code_word", "color")), 2)
        if made
        else draw.pick(
            (
                ("urgent", "normal"),
                ("high", "low"),
                ("manager", "clerk"),
                ("alarm", "fine"),
                ("yes", "no"),
                ("large", "small"),
            )
        )
    )
    bound = draw.pick((5, 10, 20, 24, 30, 50, 60, 80, 100, 250, 500))
    number = bound + draw.between(1, max(3, bound // 2)) * draw.pick((1, -1)) if draw.chance(0.85) else bound
    number = max(1, number)
    what, unit = draw.pick(
        (
            ("amount", "EUR"),
            ("temperature", "degrees"),
            ("load", "percent"),
            ("delay", "minutes"),
            ("weight", "kg"),
            ("distance", "km"),
        )
    )
    label = above if number > bound else otherwise
    item = draw.pick((draw.word("service"), draw.word("product"), draw.word("machine")))
    bounded = f"{bound} {unit}"
    rule = with_articles(draw.text("classify.rule", above=above, otherwise=otherwise, bound=bounded, what=what))
    case = with_articles(draw.text("classify.case", item=item, what=what, number=f"{number} {unit}"))
    relation = "above" if number > bound else "not above"
    return question(
        draw,
        thinking,
        draw.text("classify.limit", rule=rule, case=case),
        label,
        f"above {bound}: {above}, otherwise: {otherwise}\n{choose(number, bound, True)[0]}\n"
        f"{number} is {relation} {bound}: {label}",
    )


def member(draw: Draw, thinking: bool) -> Example:
    """Whether something is in a list: yes or no."""
    pool = draw.pick(("city", "food", "product", "first_name", "tag", "color"))
    items = draw.words(pool, draw.between(4, 6))
    wanted = draw.pick(items[1:]) if draw.chance(0.5) else items[0]
    present = draw.chance(0.5)
    listed = draw.shuffled(items) if present else [item for item in items if item != wanted]
    answer = "yes" if present else "no"
    prompt = draw.text("classify.member", item=wanted, items=", ".join(listed))
    tried = listed[: listed.index(wanted) + 1] if present else listed
    working = ", ".join(f"{item} {'yes' if item == wanted else 'no'}" for item in tried)
    return question(draw, thinking, prompt, answer, f"wanted {wanted}\n{working}")


def route(draw: Draw, thinking: bool) -> Example:
    """Which person of a list is responsible, by a table of duties in the prompt."""
    people, services = draw.words("first_name", 4), draw.words("service", 4)
    i = draw.below(4)
    train = draw.split == "train"
    form = (
        draw.pick(("{}: {}", "- {}: {}", "{} - {}", "{} -> {}", "{} ({})", "{}={}", "{} | {}")) if train else "{}: {}"
    )
    turned = train and draw.chance(0.4)
    pairs = [(p, s) if turned else (s, p) for p, s in zip(people, services, strict=True)]
    duties = "\n".join(form.format(*pair) for pair in pairs)
    message = f"{draw.word('error_text')} in {services[i]}"
    prompt = draw.text("classify.route", duties=duties, message=message)
    tried = [f"{service} {'yes' if j == i else 'no'}: {people[j]}" for j, service in enumerate(services[: i + 1])]
    if turned:
        tried = [f"{people[j]}: {service} {'yes' if j == i else 'no'}" for j, service in enumerate(services[: i + 1])]
    return question(draw, thinking, prompt, people[i], "\n".join([f"wanted {services[i]}", *tried]))
