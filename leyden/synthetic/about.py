"""What pocket knows: facts about leyden, who it is, small talk, and polite refusals of what it cannot do."""

from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw, table


def leyden(draw: Draw, thinking: bool) -> Example:
    """A question about leyden. The facts are known in both splits; the wording of held-out questions is new."""
    return _known(draw, thinking, "fact")


def chat(draw: Draw, thinking: bool) -> Example:
    """Small talk, questions to pocket about itself, and requests it has to turn down."""
    return _known(draw, thinking, "chat")


def _known(draw: Draw, thinking: bool, kind: str) -> Example:
    entries = table("about")[kind]
    i = draw.below(len(entries))
    wordings = entries[i][draw.split]
    j = draw.below(len(wordings))
    draw.templates.append(f"about.{kind}{i}/{draw.split}/{j}")
    slots = {name: draw.word(name) for name in _SLOTS if f"{{{name}}}" in wordings[j]}
    text = draw.fill(wordings[j], **slots)
    return question(
        draw, thinking, text, entries[i]["keys"], f"topic: {entries[i]['topic']}", "mentions", entries[i]["answer"]
    )


_SLOTS = ("topic", "city", "first_name", "last_name", "product", "company")
