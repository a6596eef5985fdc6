// Vercel's AI SDK, with its provider for compatible servers: chat completions.

import assert from "node:assert/strict";
import { WeatherStation, daemon, installed, main, scenario, stopped } from "./checks.mjs";

const { APICallError, generateText, jsonSchema, stepCountIs, streamText, tool } = installed("ai");
const { createOpenAICompatible } = installed("@ai-sdk/openai-compatible");
const provider = createOpenAICompatible({
  name: "rootstock",
  baseURL: daemon.baseURL,
  apiKey: "none",
  includeUsage: true,
});

const user = (content) => ({ role: "user", content });

const body = (messages, fields = {}) => ({
  model: provider(daemon.model),
  messages,
  maxOutputTokens: scenario.maxTokens,
  temperature: 0,
  maxRetries: 0,
  ...fields,
});

function tools(station) {
  const { name, description, parameters } = scenario.tool;
  const execute = async (asked) => station.getWeather(asked);
  return { [name]: tool({ description, inputSchema: jsonSchema(parameters), execute }) };
}

const checks = {
  async conversation() {
    const messages = [user(scenario.greeting)];
    const first = await generateText(body(messages));
    messages.push(...first.response.messages, user(scenario.farewell));
    const { usage } = await generateText(body(messages));
    const cached = usage.inputTokenDetails.cacheReadTokens;
    assert.ok(first.text);
    assert.ok(cached > 0);
    return `${first.text} (${cached} cached)`;
  },

  async stream() {
    const { textStream } = streamText(body([user(scenario.greeting)]));
    const slices = [];
    for await (const slice of textStream) slices.push(slice);
    const whole = await generateText(body([user(scenario.greeting)]));
    assert.equal(slices.join(""), whole.text);
    return `${slices.length} slices: ${whole.text}`;
  },

  async "tool loop"() {
    const station = new WeatherStation();
    const fields = { tools: tools(station), stopWhen: stepCountIs(5) };
    const { text } = await generateText(body([user(scenario.question)], fields));
    return station.check(text);
  },

  async errors() {
    const request = body([user(scenario.greeting)], { model: provider(scenario.unknown) });
    await assert.rejects(
      generateText(request),
      (error) => APICallError.isInstance(error) && error.statusCode === 404,
    );
    return "404";
  },
};

const scripted = {
  async image() {
    const file = { mediaType: "image/png", data: Buffer.from(scenario.picture, "base64") };
    const content = [{ type: "text", text: scenario.pictureQuestion }, { type: "file", ...file }];
    const { text } = await generateText(body([user(content)]));
    assert.ok(text.includes(scenario.pictureAnswer), text);
    return text;
  },

  async cancellation() {
    const leaving = new AbortController();
    const fields = { abortSignal: leaving.signal, onError() {} };
    const { textStream } = streamText(body([user(scenario.endless)], fields));
    const slices = textStream[Symbol.asyncIterator]();
    await slices.next();
    return stopped(() => leaving.abort());
  },
};

await main(checks, { scripted });
