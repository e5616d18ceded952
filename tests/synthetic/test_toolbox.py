import pytest

from leyden.synthetic import toolbox
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
