"""Several turns: facts remembered, a call repeated or corrected, a list kept, a number carried on."""

from leyden.synthetic import values
from leyden.synthetic.arithmetic import add, subtract, times
from leyden.synthetic.calls import request, today_rule
from leyden.synthetic.conversation import Conversation, Example, expected_calls, words_of
from leyden.synthetic.draw import Draw
from leyden.synthetic.rewrite import without
from leyden.synthetic.toolbox import Call, Param, arguments_working, box, call, listed_tool, some_setting, some_tool

# Kinds of values that a user takes back in a few words.
_CORRECTABLE = (
    "id",
    "person",
    "email",
    "path",
    "dir",
    "date",
    "time",
    "price",
    "city",
    "product",
    "color",
    "code",
    "service",
)


def recall(draw: Draw, thinking: bool) -> Example:
    """Facts of the first turn, asked for later, sometimes after other small talk."""
    facts = {
        "nickname": draw.word("first_name"),
        "city": draw.word("city"),
        "order number": values.identifier(draw),
        "favorite color": draw.word("color"),
        "code word": draw.word("code_word"),
        "budget": f"{draw.between(10, 990)} EUR",
    }
    told = draw.sample(list(facts), draw.between(2, 3))
    conversation = Conversation(draw, thinking)
    conversation.system(draw.text("dialogue.noted_rule"))
    conversation.user(
        draw.text(
            f"dialogue.tell{len(told)}", **{f"fact{i}": f"my {key} is {facts[key]}" for i, key in enumerate(told, 1)}
        )
    )
    conversation.answer("Noted.", "the user tells facts")
    if draw.chance(0.4):
        new = draw.pick([key for key in facts if key not in told])
        told.append(new)
        conversation.user(draw.text("dialogue.tell1", fact1=f"my {new} is {facts[new]}"))
        conversation.answer("Noted.", "the user tells facts")
    key = draw.pick(told)
    conversation.user(draw.text("dialogue.ask", key=key))
    conversation.answer(facts[key], f"{key}: {facts[key]}")
    return conversation.example("answer", facts[key])


def again(draw: Draw, thinking: bool) -> Example:
    """A call, its answer, and the same for something else ("and for Rome?")."""
    setting = some_setting(draw, thinking)
    tool = listed_tool(draw, setting, returning=True)
    while sum(not param.optional for param in tool.params) != 1:
        tool = listed_tool(draw, setting, returning=True)
    name, kind = tool.params[0].name, tool.params[0].kind
    first = call(draw, tool, setting, optional=0.3)
    field, result = draw.pick(tool.returns)
    number = values.sample(draw, result).json
    other = first.arguments[name]
    while other == first.arguments[name]:
        other = values.sample(draw, kind).json
    second = Call(tool, first.arguments | {name: other}, "", "")
    tools = box(draw, setting, [tool], draw.between(1, 3))
    conversation = Conversation(draw, thinking)
    conversation.system(*today_rule(draw, setting))
    conversation.user(draw.text("reading.field", ask=first.ask, field=words_of(field)))
    conversation.call([first])
    conversation.result(values.json_text(first.arguments | {field: number}))
    conversation.answer(str(number), f"{field} is {number}")
    conversation.user(draw.text("dialogue.again", other=other))
    conversation.call([second], f"needed: the same for {other}\n{arguments_working(second)}")
    return conversation.example("tool_calls", expected_calls([second]), tools, setting)


def corrected(draw: Draw, thinking: bool) -> Example:
    """A call, and the user takes one value back: the call again with the new one."""
    setting = some_setting(draw, thinking)
    params: list[Param] = []
    while not params:
        made = call(draw, some_tool(draw, setting), setting, optional=0.3)
        if made.tool.group != "read" and not made.tool.returns:
            params = [p for p in made.tool.params if p.name in made.arguments and p.kind in _CORRECTABLE]
    param = draw.pick(params)
    new = values.sample(draw, param.kind, hint=made.tool.noun)
    while new.json == made.arguments[param.name] or new.working:
        new = values.sample(draw, param.kind, hint=made.tool.noun)
    second = Call(made.tool, made.arguments | {param.name: new.json}, "", "")
    done = draw.word("done_code")
    tools = box(draw, setting, [made.tool], draw.between(1, 4))
    conversation = Conversation(draw, thinking)
    conversation.system(*today_rule(draw, setting), draw.text("rule.done", code=done))
    conversation.user(request(draw, made.ask))
    conversation.call([made])
    conversation.result(draw.pick((values.json_text({"ok": True}), "ok", values.json_text({"status": "ok"}))))
    conversation.answer(done, "the call is done")
    conversation.user(draw.text("dialogue.corrected", name=words_of(param.name), new=new.said))
    conversation.call([second], f"{param.name} is now {new.said}\n{arguments_working(second)}")
    return conversation.example("tool_calls", expected_calls([second]), tools, setting)


def kept_list(draw: Draw, thinking: bool) -> Example:
    """A list that is changed turn by turn; every answer is the whole list."""
    words = draw.words(draw.pick(("food", "product", "city")), 7)
    count = draw.pick((2, 2, 2, 3)) if draw.split == "train" else 2
    spare, items = words[:-count], words[-count:]
    conversation = Conversation(draw, thinking)
    conversation.system(draw.text("dialogue.list_rule"))
    conversation.user(draw.text("dialogue.start", items=values.listed(items)))
    conversation.answer(", ".join(items), "a new list")
    for _ in range(draw.between(1, 3)):
        if len(items) > 1 and draw.chance(0.4):
            gone = draw.pick(items)
            working = without(items, gone)
            items.remove(gone)
            conversation.user(draw.text("dialogue.take", item=gone))
            conversation.answer(", ".join(items), working)
        else:
            new = spare.pop()
            items.append(new)
            conversation.user(draw.text("dialogue.put", item=new))
            conversation.answer(", ".join(items), f"{new} at the end")
    return conversation.example("answer", ", ".join(items))


def carried(draw: Draw, thinking: bool) -> Example:
    """A sum, and one or two more steps from its result."""
    top = 60 if thinking else 5
    a, b = draw.between(2, top), draw.between(2, top)
    working, number = add(a, b)
    conversation = Conversation(draw, thinking)
    conversation.system()
    conversation.user(draw.text("dialogue.sum", a=a, b=b))
    conversation.answer(str(number), working)
    for _ in range(draw.pick((1, 1, 2))):
        n = draw.between(2, 9)
        kind = draw.pick(("add", "subtract", "times") if thinking and n < number else ("add",))
        working, number = {"add": add, "subtract": subtract, "times": times}[kind](number, n)
        working = f"{kind} {n}\n{working}"
        conversation.user(draw.text(f"dialogue.{kind}", n=n))
        conversation.answer(str(number), working)
    return conversation.example("answer", str(number))
