"""LiteLLM, as OpenHands and others use it: the vLLM provider, the OpenAI provider, the Anthropic provider."""

import sys

import litellm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def check(name: str, found: object, wanted: object) -> None:
    print(f"{'ok  ' if found == wanted else 'FAIL'} {name}: {found!r}")
    assert found == wanted


def main(url: str) -> None:
    litellm.num_retries = 0
    litellm.suppress_debug_info = True
    hello = [{"role": "user", "content": "Say hello."}]
    for model, base in (
        ("hosted_vllm/scripted", f"{url}/v1"),
        ("openai/scripted", f"{url}/v1"),
        ("anthropic/scripted", url),
    ):
        where = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 200}
        message = litellm.completion(messages=hello, **where).choices[0].message
        check(f"{model}, whole", message.content, "Hello there!")
        check(f"{model}, reasoning", message.reasoning_content, "They want a greeting.")
        chunks = list(litellm.completion(messages=hello, stream=True, **where))
        check(f"{model}, stream", "".join(c.choices[0].delta.content or "" for c in chunks), "Hello there!")
        question = [{"role": "user", "content": "Weather in Paris?"}]
        answer = litellm.completion(messages=question, tools=TOOLS, **where)
        (call,) = answer.choices[0].message.tool_calls
        check(f"{model}, call", call.function.name, "get_weather")
        question += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        answer = litellm.completion(messages=question, tools=TOOLS, **where)
        check(f"{model}, after the call", answer.choices[0].message.content, "It is sunny in Paris.")
    try:
        litellm.completion(
            model="openai/scripted", api_base=f"{url}/v1", api_key="none", messages=hello, max_tokens=10**9
        )
    except litellm.ContextWindowExceededError:
        check("an overflow is known as one", True, True)


if __name__ == "__main__":
    main(sys.argv[1])
