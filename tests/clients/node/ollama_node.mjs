// ollama for Node: chats, whole and streamed.

import assert from "node:assert/strict";
import { WeatherStation, daemon, installed, main, scenario, stopped } from "./checks.mjs";

const { Ollama } = installed("ollama");
const client = new Ollama({ host: daemon.root });

const user = (content) => ({ role: "user", content });

const notServed = (error) =>
  error.status_code === 404 && error.message.includes(scenario.unknown);

const body = (messages, fields = {}) => ({
  model: daemon.model,
  messages,
  options: { temperature: 0, num_predict: scenario.maxTokens },
  keep_alive: "5m",
  ...fields,
});

async function streamed(request) {
  const message = { role: "assistant", content: "", tool_calls: [] };
  let lines = 0;
  for await (const part of await client.chat({ ...request, stream: true })) {
    message.content += part.message.content;
    message.tool_calls.push(...(part.message.tool_calls ?? []));
    lines += 1;
  }
  return { message, lines };
}

async function toolLoop(ask) {
  const station = new WeatherStation();
  const tools = [{ type: "function", function: scenario.tool }];
  const messages = [user(scenario.question)];
  for (;;) {
    const { message } = await ask(body(messages, { tools }));
    if (!message.tool_calls?.length) return station.check(message.content);
    messages.push(message);
    for (const { function: called } of message.tool_calls) {
      const content = station.getWeather(called.arguments);
      messages.push({ role: "tool", tool_name: called.name, content });
    }
  }
}

const checks = {
  async conversation() {
    const messages = [user(scenario.greeting)];
    const first = await client.chat(body(messages));
    messages.push(first.message, user(scenario.farewell));
    const last = await client.chat(body(messages));
    assert.ok(first.message.content);
    assert.ok(last.prompt_eval_count > first.prompt_eval_count);
    return first.message.content;
  },

  async stream() {
    const { message, lines } = await streamed(body([user(scenario.greeting)]));
    const whole = await client.chat(body([user(scenario.greeting)]));
    assert.equal(message.content, whole.message.content);
    return `${lines} lines: ${message.content}`;
  },

  "tool loop": () => toolLoop((request) => client.chat(request)),

  "streamed tool loop": () => toolLoop(streamed),

  async errors() {
    const unknown = body([user(scenario.greeting)], { model: scenario.unknown });
    await assert.rejects(client.chat(unknown), notServed);
    await assert.rejects(client.chat(body([user("word ".repeat(100_000))])), { status_code: 400 });
    return "404 and 400";
  },
};

const scripted = {
  async image() {
    const images = [Buffer.from(scenario.picture, "base64")];
    const { message } = await client.chat(body([{ ...user(scenario.pictureQuestion), images }]));
    assert.ok(message.content.includes(scenario.pictureAnswer), message.content);
    return message.content;
  },

  async cancellation() {
    const parts = await client.chat(body([user(scenario.endless)], { stream: true }));
    await parts[Symbol.asyncIterator]().next();
    return stopped(() => parts.abort());
  },
};

await main(checks, { scripted });
