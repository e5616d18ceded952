// The openai package for JavaScript: whole answers, streams, calls, Responses, errors.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "scripted";
const user = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];

function check(name, found, wanted) {
  const same = JSON.stringify(found) === JSON.stringify(wanted);
  console.log(`${same ? "ok  " : "FAIL"} ${name}: ${JSON.stringify(found)}`);
  if (!same) process.exitCode = 1;
}

const whole = await client.chat.completions.create({ model, messages: user("Say hello.") });
check("whole", whole.choices[0].message.content, "Hello there!");
check("reasoning", whole.choices[0].message.reasoning, "They want a greeting.");

let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ model, messages: user("Say hello."), ...options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
check("stream", text, "Hello there!");
check("usage", usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);

const runner = client.chat.completions.runTools({
  model,
  messages: user("Weather in Paris?"),
  tools: [{ type: "function", function: { ...tools[0].function, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` } }],
});
check("loop of calls", await runner.finalContent(), "It is sunny in Paris.");

const stream = client.chat.completions.stream({ model, messages: user("Two cities?"), tools });
const calls = (await stream.finalMessage()).tool_calls.map((call) => call.function.arguments);
check("calls of a stream", calls, ['{"city": "Oslo"}', '{"city": "Rome"}']);

const response = await client.responses.create({ model, input: "Say hello." });
check("responses", response.output_text, "Hello there!");
const events = [];
for await (const event of await client.responses.create({ model, input: "Say hello.", stream: true })) events.push(event.type);
check("responses stream", [events[0], events.at(-1)], ["response.created", "response.completed"]);

try {
  await client.chat.completions.create({ model: "other", messages: user("x") });
} catch (error) {
  check("error", [error.status, error.type], [404, "NotFoundError"]);
}
