"""Choosing a tool and filling its arguments: one call, several at once, no tool that fits, a value that is missing."""

from dataclasses import replace

from leyden.synthetic.conversation import Conversation, Example, expected_calls
from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import (
    IRREPLACEABLE,
    NEW,
    Call,
    Setting,
    Tool,
    answering_tool,
    box,
    box_without,
    call,
    explicit_call,
    listed_tool,
    made_tool,
    new_tool,
    some_setting,
    some_tool,
)

ASKED = 0.2  # of single requests in training are questions
_TRIES = 30  # at different calls of the same tool


def single(draw: Draw, thinking: bool) -> Example:
    """One call out of a box of one to six tools."""
    setting = some_setting(draw, thinking)
    if draw.unseen(ASKED):
        wanted, text = question(draw, answering_tool(draw, setting), setting)
        return _calling(draw, setting, [wanted], text, draw.pick((1, 1, 2, 3, 4)))
    tool = some_tool(draw, setting)
    wanted = explicit_call(draw, tool, setting) if draw.chance(0.15) else call(draw, tool, setting)
    return _calling(draw, setting, [wanted], request(draw, wanted.ask), draw.pick((1, 2, 2, 3, 3, 4, 5, 6)))


def parallel(draw: Draw, thinking: bool) -> Example:
    """Two or three calls in one turn, of one tool or of several."""
    used = len(draw.templates)
    setting = some_setting(draw, thinking)
    count = draw.pick((2, 2, 3))
    if draw.chance(0.5):
        tools = [some_tool(draw, setting)] * count
        while not tools[0].params:
            tools = [some_tool(draw, setting)] * count
    else:
        tools = box(draw, setting, [some_tool(draw, setting)], count)
    wanted: list[Call] = []
    for _ in range(_TRIES):
        made = call(draw, tools[len(wanted)], setting, optional=0.3)
        if made.arguments not in [w.arguments for w in wanted if w.tool.name == made.tool.name]:
            wanted.append(made)
        if len(wanted) == len(tools):
            break
    else:  # a tool that cannot be called in so many ways, such as one with a single flag
        del draw.templates[used:]
        return parallel(draw, thinking)
    asks = {f"ask{i}": made.ask for i, made in enumerate(wanted, 1)}
    text = draw.text(f"tools.parallel{count}", **asks)
    return _calling(draw, setting, wanted, text, draw.between(1, 4))


def none_fits(draw: Draw, thinking: bool) -> Example:
    """No tool of the box can do it: the code that the system prompt asks for."""
    setting = some_setting(draw, thinking)
    asked = draw.unseen(ASKED)
    if asked:
        absent = answering_tool(draw, setting)
    elif draw.unseen(NEW):
        absent = new_tool(draw, setting)
    else:
        absent = made_tool(draw, setting, groups=IRREPLACEABLE) if draw.chance(0.6) else listed_tool(draw, setting)
    tools = box_without(draw, setting, absent, draw.between(1, 5))
    code = draw.word("no_tool_code")
    conversation = Conversation(draw, thinking)
    conversation.system(*today_rule(draw, setting), draw.text("rule.no_tool", code=code))
    if asked:
        wanted, text = question(draw, absent, setting)
    else:
        wanted = call(draw, absent, setting)
        text = request(draw, wanted.ask)
    conversation.user(text)
    conversation.answer(code, f"needed: {wanted.ask}\ntool: none")
    return conversation.example("answer", code, tools, setting)


def missing(draw: Draw, thinking: bool) -> Example:
    """A required value is not given: its name, in the form that the system prompt asks for."""
    setting = replace(some_setting(draw, thinking), today=None)
    tool = some_tool(draw, setting)
    while sum(not param.optional for param in tool.params) < 2:
        tool = some_tool(draw, setting)
    required = [param.name for param in tool.params if not param.optional]
    gone = draw.sample(required, draw.between(1, min(2, len(required))))
    wanted = explicit_call(draw, tool, setting, left_out=gone)
    tools = box(draw, setting, [tool], draw.between(1, 3))
    code, names = draw.word("missing_code"), ", ".join(name for name in required if name in gone)
    conversation = Conversation(draw, thinking)
    conversation.system(draw.text("rule.missing", code=code))
    conversation.user(request(draw, wanted.ask))
    conversation.answer(f"{code}: {names}", f"needed: {wanted.ask}\n{wanted.working}")
    return conversation.example("answer", f"{code}: {names}", tools, setting)


def request(draw: Draw, ask: str) -> str:
    """An imperative as a user writes it."""
    return draw.text("tools.request", ask=ask)


def question(draw: Draw, tool: Tool, setting: Setting) -> tuple[Call, str]:
    """A call of `tool` to answer a question, and the question as a user writes it."""
    wanted = call(draw, replace(tool, ask=tool.questions), setting, optional=0.2)
    return replace(wanted, tool=tool), draw.text("tools.question", ask=wanted.ask)


def _calling(draw: Draw, setting: Setting, wanted: list[Call], text: str, size: int) -> Example:
    tools = box(draw, setting, list({made.tool.name: made.tool for made in wanted}.values()), size)
    rules = [draw.text("rule.no_tool", code=draw.word("no_tool_code"))] if draw.chance(0.2) else []
    rules += [draw.text("rule.missing", code=draw.word("missing_code"))] if draw.chance(0.15) else []
    conversation = Conversation(draw, setting.thinking)
    conversation.system(*today_rule(draw, setting), *rules)
    conversation.user(text)
    conversation.call(wanted)
    return conversation.example("tool_calls", expected_calls(wanted), tools, setting)


def today_rule(draw: Draw, setting: Setting) -> list[str]:
    """The line of the system prompt that tells the day, if the setting has one."""
    return [draw.text("system.today", date=setting.today)] if setting.today else []
