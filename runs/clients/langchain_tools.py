"""LangChain and LangGraph: ChatOpenAI with tools, streams, and an agent that calls them until it has an answer."""

import sys

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def check(name: str, found: object, wanted: object) -> None:
    print(f"{'ok  ' if found == wanted else 'FAIL'} {name}: {found!r}")
    assert found == wanted


def main(url: str) -> None:
    model = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0)
    check("whole", model.invoke("Say hello.").content, "Hello there!")
    check("stream", "".join(chunk.content for chunk in model.stream("Say hello.")), "Hello there!")
    bound = model.bind_tools([get_weather])
    (call,) = bound.invoke("Weather in Paris?").tool_calls
    check("call", (call["name"], call["args"]), ("get_weather", {"city": "Paris", "days": 2}))
    gathered = None
    for chunk in bound.stream("Two cities?"):
        gathered = chunk if gathered is None else gathered + chunk
    check("calls of a stream", [call["args"] for call in gathered.tool_calls], [{"city": "Oslo"}, {"city": "Rome"}])

    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    agent = graph.compile()
    for question, answer in (
        ("Weather in Paris?", "It is sunny in Paris."),
        ("Two cities?", "Oslo and Rome are sunny."),
    ):
        found = agent.invoke({"messages": [HumanMessage(question)]})
        check(f"agent, {question}", found["messages"][-1].content, answer)


if __name__ == "__main__":
    main(sys.argv[1])
