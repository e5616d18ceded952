"""Reading results: a field of a tool's answer, a question about rows, a text file, a failed call, a second step.

The conversations run through the whole tool loop; the checked turn is the last one.
"""

import re

from leyden.synthetic import calendar, records, values
from leyden.synthetic.arithmetic import choose
from leyden.synthetic.calls import request, today_rule
from leyden.synthetic.conversation import Conversation, Example, expected_calls, words_of
from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import (
    Call,
    Setting,
    Tool,
    arguments_working,
    box,
    call,
    file_tool,
    listed_tool,
    made_tool,
    plural,
    some_setting,
    some_tool,
)


def lookup(draw: Draw, thinking: bool) -> Example:
    """A call, its result with several fields, and the value of one field."""
    setting = some_setting(draw, thinking)
    tool = listed_tool(draw, setting, returning=True)
    made = call(draw, tool, setting, optional=0.2)
    result = {field: values.sample(draw, kind).json for field, kind in draw.shuffled(tool.returns)}
    field = draw.pick(list(result))
    conversation, tools = _started(
        draw, thinking, [made], draw.text("reading.field", ask=made.ask, field=words_of(field)), setting
    )
    conversation.result(values.json_text(made.arguments | result))
    conversation.answer(str(result[field]), f"{field} is {result[field]}")
    return conversation.example("answer", str(result[field]), tools, setting)


def compare(draw: Draw, thinking: bool) -> Example:
    """The same call for two things at once, and which of them has more."""
    setting = some_setting(draw, thinking)
    tool = listed_tool(draw, setting, returning=True)
    while not tool.params or tool.params[0].optional or len([p for p in tool.params if not p.optional]) > 1:
        tool = listed_tool(draw, setting, returning=True)
    name = tool.params[0].name
    first, second = call(draw, tool, setting, optional=0), call(draw, tool, setting, optional=0)
    while first.arguments == second.arguments:
        second = call(draw, tool, setting, optional=0)
    field, kind = draw.pick(tool.returns)
    a, b = values.sample(draw, kind).json, values.sample(draw, kind).json
    while a == b:
        b = values.sample(draw, kind).json
    more = draw.chance(0.5)
    text = draw.text(
        f"reading.{'more' if more else 'less'}",
        ask1=first.ask,
        ask2=second.ask,
        field=words_of(field),
        param=words_of(name),
    )
    conversation, tools = _started(draw, thinking, [first, second], text, setting)
    conversation.result(*(values.json_text(made.arguments | {field: n}) for made, n in ((first, a), (second, b))))
    winner = first if (a > b) == more else second
    answer = str(winner.arguments[name])
    kind = f"{'largest' if more else 'smallest'} {field}"
    conversation.answer(
        answer,
        f"{kind}\n{first.arguments[name]} {a}\n{second.arguments[name]} {b}, {choose(a, b, more)[0]}, {answer}",
    )
    return conversation.example("answer", answer, tools, setting)


def rows(draw: Draw, thinking: bool) -> Example:
    """A list of records from a tool and a question about them."""
    setting = some_setting(draw, thinking)
    tool = made_tool(draw, setting, id="list_{nouns}")
    made = call(draw, tool, setting, optional=0)
    data = records.some_records(draw, tool.noun)
    question = records.ask(draw, data, easy=not thinking)
    conversation, tools = _started(draw, thinking, [made], f"{request(draw, made.ask)} {question.text}", setting)
    conversation.result(data.as_json(draw))
    conversation.answer(question.answer, question.working)
    return conversation.example("answer", question.answer, tools, setting)


def prompt_rows(draw: Draw, thinking: bool) -> Example:
    """A question about a table that stands in the prompt."""
    data = records.some_records(draw)
    question = records.ask(draw, data, easy=not thinking)
    conversation = Conversation(draw, thinking)
    conversation.system()
    conversation.user(
        draw.text("reading.inline", nouns=plural(data.noun), data=data.as_text(draw), question=question.text)
    )
    conversation.answer(question.answer, question.working)
    return conversation.example("answer", question.answer)


def text_file(draw: Draw, thinking: bool) -> Example:
    """A settings file or a log, read by a tool, and a question about its lines."""
    setting = some_setting(draw, thinking)
    made = call(draw, file_tool(draw, setting), setting)
    if draw.chance(0.5) or not thinking:
        keys = draw.words("symbol", draw.between(3, 6))
        sign = draw.pick((" = ", ": ", "="))
        settings = {
            key: draw.pick((str(draw.between(1, 999)), draw.word("code_word"), draw.pick(("true", "false"))))
            for key in keys
        }
        key = draw.pick(keys)
        content = "\n".join(f"{k}{sign}{v}" for k, v in settings.items())
        question, working, answer = draw.text("reading.setting", key=key), f"{key} is {settings[key]}", settings[key]
    else:
        levels = [draw.pick(("ERROR", "INFO", "WARNING", "DEBUG")) for _ in range(draw.between(4, 8))]
        level = draw.pick(levels)
        content = "\n".join(
            f"{calendar.clock(540 + 7 * i)} {each} {draw.word('service')} {draw.word('error_text')}"
            for i, each in enumerate(levels)
        )
        counted = [
            f"{each} {'yes' if each == level else 'no'}: {levels[: i + 1].count(level)}"
            for i, each in enumerate(levels)
        ]
        question, working, answer = (
            draw.text("reading.level", level=level),
            "\n".join([f"count {level}", *counted]),
            str(levels.count(level)),
        )
    conversation, tools = _started(draw, thinking, [made], f"{request(draw, made.ask)} {question}", setting)
    conversation.result(content)
    conversation.answer(answer, working)
    return conversation.example("answer", answer, tools, setting)


def failure(draw: Draw, thinking: bool) -> Example:
    """The tool returns an error: the report that the system prompt asks for."""
    setting = some_setting(draw, thinking)
    made = call(draw, some_tool(draw, setting), setting)
    code, error = draw.word("fail_code"), draw.word("error_text")
    if made.arguments and draw.chance(0.4):
        error = f"{draw.pick(list(made.arguments))} {error}"
    sign = draw.pick((": ", ": ", " - ", " | ", "=", " -> ", " / ")) if draw.split == "train" else ": "
    rule = draw.text("rule.failed", code=code, sign=sign)
    conversation, tools = _started(draw, thinking, [made], request(draw, made.ask), setting, rule)
    conversation.result(draw.pick((values.json_text({"error": error}), f"error: {error}", f"Error: {error}")))
    conversation.answer(f"{code}{sign}{error}", f"the tool returned an error: {error}")
    return conversation.example("answer", f"{code}{sign}{error}", tools, setting)


def retry(draw: Draw, thinking: bool) -> Example:
    """The tool knows a better value for one argument: the same call with it."""
    setting = some_setting(draw, thinking)
    made = call(draw, some_tool(draw, setting), setting, optional=0.3)
    while not (names := [name for name, value in made.arguments.items() if isinstance(value, str)]):
        made = call(draw, some_tool(draw, setting), setting, optional=0.3)
    name = draw.pick(names)
    param = next(p for p in made.tool.params if p.name == name)
    better = made.arguments[name]
    while better == made.arguments[name]:
        better = values.sample(draw, param.kind, hint=made.tool.noun).json
    conversation, tools = _started(draw, thinking, [made], request(draw, made.ask), setting)
    error = draw.text("reading.better", name=name, value=made.arguments[name], better=better)
    conversation.result(draw.pick((values.json_text({"error": error}), error)))
    again = Call(made.tool, made.arguments | {name: better}, made.ask, "")
    conversation.call([again], f"{name} {better} instead of {made.arguments[name]}\n{arguments_working(again)}")
    return conversation.example("tool_calls", expected_calls([again]), tools, setting)


def chain(draw: Draw, thinking: bool) -> Example:
    """Find a thing by its title, then act on it with the id that was found; sometimes up to the final answer."""
    setting = some_setting(draw, thinking)
    noun = draw.word("noun")
    finder = made_tool(draw, setting, noun=noun, id="find_{noun}")
    actor = made_tool(draw, setting, noun=noun, id=draw.pick(_BY_ID))
    find, act = call(draw, finder, setting, optional=0), call(draw, actor, setting, optional=0.3)
    found = act.arguments[actor.params[0].name]
    link = r"( ((that has|with|of|under|whose)( the)? id( is)?|number|no\.)|:)?"
    it = re.sub(rf"((the|this|that|our|my) )?{noun}{link} \(?{found}\)?", "it", act.ask)
    done = draw.word("done_code")
    text = draw.text("reading.chain", ask=find.ask, it=it)
    rule = draw.text("rule.done", code=done)
    conversation, tools = _started(draw, thinking, [find, act], text, setting, rule, first=1)
    wanted = find.arguments[finder.params[0].name]
    hits = [{"id": found, "title": wanted}]
    hits += [{"id": values.identifier(draw, noun), "title": values.title(draw)} for _ in range(draw.below(3))]
    hits = draw.shuffled(hits)
    conversation.result(values.json_text({"hits": hits}))
    tried = [f"{hit['id']} {hit['title']} {'yes' if hit['id'] == found else 'no'}" for hit in hits]
    tried = tried[: 1 + next(i for i, hit in enumerate(hits) if hit["id"] == found)]
    conversation.call([act], "\n".join([f"wanted {wanted}", *tried, act.working]))
    if draw.chance(0.5):
        return conversation.example("tool_calls", expected_calls([act]), tools, setting)
    conversation.result(
        draw.pick((values.json_text({"ok": True}), "ok", values.json_text({"status": "ok", "id": found})))
    )
    conversation.answer(done, "both steps are done")
    return conversation.example("answer", done, tools, setting)


def _started(
    draw: Draw, thinking: bool, calls: list[Call], text: str, setting: Setting, *rules: str, first: int = 9
) -> tuple[Conversation, list[Tool]]:
    """A conversation up to its first calls (the first `first` of `calls`), and the box of tools it has."""
    tools = box(draw, setting, list({each.tool.name: each.tool for each in calls}.values()), draw.between(1, 4))
    conversation = Conversation(draw, thinking)
    conversation.system(*today_rule(draw, setting), *rules)
    conversation.user(text)
    conversation.call(calls[:first])
    return conversation, tools


# Actions whose first parameter is the id of the thing and that make sense once.
_BY_ID = (
    "delete_{noun}",
    "rename_{noun}",
    "assign_{noun}",
    "set_{noun}_status",
    "archive_{noun}",
    "share_{noun}",
    "tag_{noun}",
    "move_{noun}",
    "copy_{noun}",
    "lock_{noun}",
    "approve_{noun}",
    "reject_{noun}",
    "set_{noun}_price",
    "validate_{noun}",
)
