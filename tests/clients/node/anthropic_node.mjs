// anthropic for Node: Messages, whole and streamed.

import assert from "node:assert/strict";
import { WeatherStation, daemon, installed, main, scenario, stopped } from "./checks.mjs";

const { Anthropic } = installed("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL: daemon.root, apiKey: "none", maxRetries: 0 });

const user = (content) => ({ role: "user", content });

const notServed = (error) =>
  error instanceof Anthropic.NotFoundError && error.message.includes(scenario.unknown);

const body = (messages, fields = {}) => ({
  model: daemon.model,
  messages,
  max_tokens: scenario.maxTokens,
  temperature: 0,
  ...fields,
});

const textOf = ({ content }) =>
  content.map((block) => (block.type === "text" ? block.text : "")).join("");

async function toolLoop(ask) {
  const station = new WeatherStation();
  const { name, description, parameters } = scenario.tool;
  const tools = [{ name, description, input_schema: parameters }];
  const messages = [user(scenario.question)];
  for (;;) {
    const answer = await ask(body(messages, { tools }));
    const calls = answer.content.filter((block) => block.type === "tool_use");
    if (answer.stop_reason !== "tool_use") {
      assert.ok(answer.usage.cache_read_input_tokens > 0);
      return station.check(textOf(answer));
    }
    const results = calls.map(({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: [{ type: "text", text: station.getWeather(input) }],
    }));
    messages.push({ role: "assistant", content: answer.content }, user(results));
  }
}

const checks = {
  async conversation() {
    const messages = [user(scenario.greeting)];
    const first = await client.messages.create(body(messages));
    messages.push({ role: "assistant", content: first.content }, user(scenario.farewell));
    const cached = (await client.messages.create(body(messages))).usage.cache_read_input_tokens;
    assert.ok(textOf(first));
    assert.ok(cached > 0);
    return `${textOf(first)} (${cached} cached)`;
  },

  async stream() {
    const stream = client.messages.stream(body([user(scenario.greeting)]));
    const slices = [];
    stream.on("text", (slice) => slices.push(slice));
    const answer = await stream.finalMessage();
    assert.equal(slices.join(""), textOf(answer));
    assert.equal(textOf(answer), textOf(await client.messages.create(body([user(scenario.greeting)]))));
    return `${slices.length} slices: ${textOf(answer)}`;
  },

  "tool loop": () => toolLoop((request) => client.messages.create(request)),

  "streamed tool loop": () => toolLoop((request) => client.messages.stream(request).finalMessage()),

  async errors() {
    const unknown = body([user(scenario.greeting)], { model: scenario.unknown });
    await assert.rejects(client.messages.create(unknown), notServed);
    await assert.rejects(client.messages.create(body([])), Anthropic.BadRequestError);
    return "404 and 400";
  },
};

const scripted = {
  async image() {
    const source = { type: "base64", media_type: "image/png", data: scenario.picture };
    const content = [{ type: "image", source }, { type: "text", text: scenario.pictureQuestion }];
    const said = textOf(await client.messages.create(body([user(content)])));
    assert.ok(said.includes(scenario.pictureAnswer), said);
    return said;
  },

  async cancellation() {
    const stream = await client.messages.create(body([user(scenario.endless)], { stream: true }));
    await stream[Symbol.asyncIterator]().next();
    return stopped(() => stream.controller.abort());
  },
};

await main(checks, { scripted });
