import pytest

from leyden.synthetic import toolbox
from leyden.synthetic.conversation import words_of
from leyden.synthetic.draw import Draw
from leyden.synthetic.toolbox import Setting

PLAIN = Setting(thinking=True)


def test_made_tools_take_the_names_of_action_and_noun():
    tool = toolbox.made_tool(Draw(0, 0, "heldout"), PLAIN, noun="purchase order", id="get_{noun}")
    assert tool.name == "get_purchase_order"
    assert tool.params[0].name == "purchase_order_id"
    camel = toolbox.made_tool(
        Draw(0, 0, "heldout"), Setting(True, casing="camel"), noun="purchase order", id="list_{nouns}"
    )
    assert camel.name == "listPurchaseOrders"


def test_schema():
    tool = toolbox.made_tool(Draw(0, 3, "heldout"), PLAIN, noun="invoice", id="delete_{noun}")
    schema = tool.schema(described=True, defaults=True)["function"]
    assert schema["parameters"]["required"] == ["invoice_id"]
    assert schema["parameters"]["properties"]["force"] == {
        "type": "boolean",
        "description": "Skip the confirmation.",
        "default": False,
    }
    bare = tool.schema(described=False, defaults=False)["function"]["parameters"]["properties"]
    assert bare["force"] == {"type": "boolean"}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_boxes(split):
    for i in range(150):
        draw = Draw(1, i, split)
        wanted = toolbox.some_tool(draw, PLAIN)
        tools = toolbox.box(draw, PLAIN, [wanted], 5)
        names = [tool.name for tool in tools]
        assert wanted in tools and len(set(names)) == len(names) == 5
        without = toolbox.box_without(draw, PLAIN, wanted, 4)
        assert len(without) == 4 and not any(tool.name == wanted.name or tool.group == wanted.group for tool in without)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_request_states_every_argument_of_the_call(split):
    """Copied values stand in the request as they are; the others have a line of working."""
    for i in range(300):
        draw = Draw(2, i, split)
        made = toolbox.call(draw, toolbox.some_tool(draw, PLAIN), PLAIN, optional=0.5)
        for param in made.tool.params:
            value = made.arguments.get(param.name)
            assert value is not None or param.optional
            if isinstance(value, str) and param.kind not in ("date", "time"):
                assert value in made.ask


def test_optional_parameters_can_be_left_out():
    draw = Draw(0, 1, "train")
    tool = toolbox.made_tool(draw, PLAIN, id="create_{noun}")
    assert list(toolbox.call(draw, tool, PLAIN, optional=0).arguments) == ["title"]
    assert len(toolbox.call(draw, tool, PLAIN, optional=1).arguments) == len(tool.params)


def test_explicit_calls_name_tool_and_parameters():
    draw = Draw(0, 2, "train")
    tool = toolbox.made_tool(draw, PLAIN, id="assign_{noun}", noun="ticket")
    made = toolbox.explicit_call(draw, tool, PLAIN, left_out=["assignee"])
    assert "assign_ticket" in made.ask and "ticket_id" in made.ask and "assignee" not in made.ask
    assert "assignee" not in made.arguments


@pytest.mark.parametrize(
    ("noun", "nouns"),
    [("ticket", "tickets"), ("policy", "policies"), ("day", "days"), ("box", "boxes"), ("crutch", "crutches")],
)
def test_plural(noun, nouns):
    assert toolbox.plural(noun) == nouns


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a invoice", "an invoice"),
        ("A event", "An event"),
        ("a user", "a user"),
        ("a ticket", "a ticket"),
        ("a update", "an update"),
    ],
)
def test_articles(text, right):
    assert toolbox.with_articles(text) == right


def test_new_tools_are_asked_for_by_their_own_words():
    for i in range(300):
        draw = Draw(3, i, "train")
        tool = toolbox.new_tool(draw, PLAIN)
        made = toolbox.call(draw, tool, PLAIN, optional=1)
        assert tool.verb in made.ask and tool.noun in made.ask
        assert tool.verb in tool.about.lower()
        assert tool.noun in tool.about or toolbox.plural(tool.noun) in tool.about
        required = [param.name for param in tool.params if not param.optional]
        assert tool.schema(True, True)["function"]["parameters"].get("required", []) == required
        assert set(made.arguments) == {param.name for param in tool.params}
        for param in tool.params:
            if param.kind == "flag":  # said by its name, as nothing else tells them apart
                words = param.name.replace("_", " ")
                assert words in made.ask


def test_new_tools_are_never_held_out():
    ids = {toolbox.some_tool(Draw(5, i, "heldout"), PLAIN).id for i in range(300)}
    assert "new" not in ids
    ids = [toolbox.some_tool(Draw(5, i, "train"), PLAIN).id for i in range(300)]
    assert 120 <= ids.count("new") <= 180


def test_no_box_has_two_tools_for_the_same():
    for i in range(300):
        draw = Draw(7, i, "train")
        wanted = toolbox.made_tool(draw, PLAIN)
        tools = toolbox.box(draw, PLAIN, [wanted], 6)
        assert not any(t is not wanted and (t.id, t.noun) == (wanted.id, wanted.noun) for t in tools)


def test_boxes_hold_new_tools_that_differ_in_one_word():
    shared = {"verb": 0, "noun": 0}
    for i in range(200):
        draw = Draw(6, i, "train")
        wanted = toolbox.new_tool(draw, PLAIN)
        for other in toolbox.box(draw, PLAIN, [wanted], 4):
            if other is not wanted:
                assert (other.verb, other.noun) != (wanted.verb, wanted.noun)
                shared["verb"] += other.verb == wanted.verb
                shared["noun"] += other.noun == wanted.noun
    assert min(shared.values()) > 40


@pytest.mark.parametrize(
    ("casing", "name"),
    [
        ("snake", "purchase_order_id"),
        ("camel", "purchaseOrderId"),
        ("pascal", "PurchaseOrderId"),
        ("kebab", "purchase-order-id"),
        ("upper", "PURCHASE_ORDER_ID"),
    ],
)
def test_casings(casing, name):
    assert toolbox.spelled("purchase order_id", casing) == name
    assert words_of(name) == "purchase order id"


def test_the_working_says_how_a_value_follows():
    draw = Draw(0, 3, "heldout")
    tool = toolbox.made_tool(draw, PLAIN, noun="permit", id="delete_{noun}")
    made = toolbox.call(draw, tool, PLAIN, optional=1)
    permit, force = made.working.split("\n")[1:3]
    assert permit == f"permit_id: {made.arguments['permit_id']}"
    assert force in ("force: with no confirmation -> true", "force: but do ask for confirmation -> false")
