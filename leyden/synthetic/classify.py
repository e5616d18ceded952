"""Short classification: labels with their words, good or bad, a rule with a limit, a list that has something or not."""

from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import with_articles


def labels(draw: Draw, thinking: bool) -> Example:
    """A message and labels, each with the words that belong to it."""
    chosen = draw.pick([each for each in table("labels")["set"] if each["split"] == draw.split])["labels"]
    names = draw.sample(list(chosen), draw.between(2, len(chosen)))
    label = draw.pick(names)
    cue = draw.pick(chosen[label].split(", "))
    lines = "\n".join(f"- {name}: {chosen[name]}" for name in names)
    text = draw.text("classify.message", cue=cue, city=draw.word("city"), name=draw.word("first_name"))
    prompt = draw.text("classify.labels", labels=lines, names=", ".join(names), text=text)
    return question(draw, thinking, prompt, label, f"{cue} belongs to {label}")


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
    above, otherwise = draw.pick(
        (
            ("urgent", "normal"),
            ("high", "low"),
            ("manager", "clerk"),
            ("alarm", "fine"),
            ("yes", "no"),
            ("large", "small"),
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
    rule = draw.text("classify.rule", above=above, otherwise=otherwise, bound=f"{bound} {unit}", what=what)
    case = draw.text("classify.case", item=item, what=what, number=f"{number} {unit}")
    relation = "above" if number > bound else "equal to" if number == bound else "below"
    return question(
        draw,
        thinking,
        draw.text("classify.limit", rule=rule, case=case),
        label,
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
    working = ", ".join(f"{item} {'yes' if item == wanted else 'no'}" for item in listed)
    return question(draw, thinking, prompt, answer, working)


def route(draw: Draw, thinking: bool) -> Example:
    """Which person of a list is responsible, by a table of duties in the prompt."""
    people, services = draw.words("first_name", 4), draw.words("service", 4)
    i = draw.below(4)
    duties = "\n".join(f"{service}: {person}" for person, service in zip(people, services, strict=True))
    message = f"{draw.word('error_text')} in {services[i]}"
    prompt = draw.text("classify.route", duties=duties, message=message)
    return question(draw, thinking, prompt, people[i], f"{services[i]} belongs to {people[i]}")
