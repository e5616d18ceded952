"""openai-agents: an agent with a tool, over chat completions and over Responses, whole and streamed."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def check(name: str, found: object, wanted: object) -> None:
    print(f"{'ok  ' if found == wanted else 'FAIL'} {name}: {found!r}")
    assert found == wanted


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="scripted", openai_client=client)
        agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[get_weather])
        found = await Runner.run(agent, "Weather in Paris?")
        check(kind.__name__, found.final_output, "It is sunny in Paris.")
        streamed = Runner.run_streamed(agent, "Two cities?")
        events = [event.type async for event in streamed.stream_events()]
        check(f"{kind.__name__}, streamed", streamed.final_output, "Oslo and Rome are sunny.")
        assert "raw_response_event" in events


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
