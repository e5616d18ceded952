"""What pocket knows: facts about leyden, who it is, small talk, and polite refusals of what it cannot do.

Some examples have tools at hand, which are of no use for the question.
"""

from leyden.synthetic.conversation import Example, question
from leyden.synthetic.draw import Draw, table
from leyden.synthetic.toolbox import box, made_tool, some_setting


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
    topic = entries[i]["topic"]
    made = question(draw, thinking, text, entries[i]["keys"], f"topic: {topic}", "mentions", entries[i]["answer"])
    if topic != "no tools" and draw.chance(0.2):
        setting = some_setting(draw, thinking)
        tools = box(draw, setting, [made_tool(draw, setting)], draw.between(1, 4))
        made["tools"] = [tool.schema(setting.described, setting.defaults) for tool in tools]
    return made


_SLOTS = ("topic", "city", "first_name", "last_name", "product", "company")
