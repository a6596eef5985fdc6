// openai for Node: chat completions and Responses.

import assert from "node:assert/strict";
import { WeatherStation, daemon, installed, main, scenario, stopped } from "./checks.mjs";

const { OpenAI } = installed("openai");
const client = new OpenAI({ baseURL: daemon.baseURL, apiKey: "none", maxRetries: 0 });

const user = (content) => ({ role: "user", content });

const notServed = (error) =>
  error instanceof OpenAI.NotFoundError && error.message.includes(scenario.unknown);

const chatBody = (messages, fields = {}) => ({
  model: daemon.model,
  messages,
  max_tokens: scenario.maxTokens,
  temperature: 0,
  ...fields,
});

const body = (input, fields = {}) => ({
  model: daemon.model,
  input,
  max_output_tokens: scenario.maxTokens,
  temperature: 0,
  ...fields,
});

const chatChecks = {
  async conversation() {
    const messages = [user(scenario.greeting)];
    const first = await client.chat.completions.create(chatBody(messages));
    messages.push(first.choices[0].message, user(scenario.farewell));
    const last = await client.chat.completions.create(chatBody(messages));
    const cached = last.usage.prompt_tokens_details.cached_tokens;
    assert.ok(first.choices[0].message.content);
    assert.ok(cached > 0);
    return `${first.choices[0].message.content} (${cached} cached)`;
  },

  async stream() {
    const stream = client.chat.completions.stream(chatBody([user(scenario.greeting)]));
    let chunks = 0;
    for await (const _ of stream) chunks += 1;
    const text = await stream.finalContent();
    const whole = await client.chat.completions.create(chatBody([user(scenario.greeting)]));
    assert.equal(text, whole.choices[0].message.content);
    return `${chunks} chunks: ${text}`;
  },

  async "tool loop"() {
    const station = new WeatherStation();
    const tool = {
      type: "function",
      function: { ...scenario.tool, parse: JSON.parse, function: (asked) => station.getWeather(asked) },
    };
    const request = chatBody([user(scenario.question)], { tools: [tool], stream: true });
    return station.check(await client.chat.completions.runTools(request).finalContent());
  },

  async errors() {
    const unknown = chatBody([user(scenario.greeting)], { model: scenario.unknown });
    await assert.rejects(client.chat.completions.create(unknown), notServed);
    await assert.rejects(client.chat.completions.create(chatBody([])), OpenAI.BadRequestError);
    return "404 and 400";
  },
};

const responsesChecks = {
  async "responses conversation"() {
    const first = await client.responses.create(body(scenario.greeting));
    const next = body(scenario.farewell, { previous_response_id: first.id });
    const cached = (await client.responses.create(next)).usage.input_tokens_details.cached_tokens;
    assert.ok(first.output_text);
    assert.ok(cached > 0);
    return `${first.output_text} (${cached} cached)`;
  },

  async "responses stream"() {
    const stream = client.responses.stream(body(scenario.greeting));
    let events = 0;
    for await (const _ of stream) events += 1;
    const text = (await stream.finalResponse()).output_text;
    assert.equal(text, (await client.responses.create(body(scenario.greeting))).output_text);
    return `${events} events: ${text}`;
  },

  async "responses tool loop"() {
    const station = new WeatherStation();
    const tools = [{ type: "function", strict: false, ...scenario.tool }];
    const items = [user(scenario.question)];
    for (;;) {
      const answer = await client.responses.create(body(items, { tools, store: false }));
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) return station.check(answer.output_text);
      items.push(...answer.output);
      for (const { call_id, arguments: asked } of calls) {
        const output = station.getWeather(JSON.parse(asked));
        items.push({ type: "function_call_output", call_id, output });
      }
    }
  },

  async "responses errors"() {
    const unknown = body(scenario.greeting, { model: scenario.unknown });
    await assert.rejects(client.responses.create(unknown), notServed);
    await assert.rejects(client.responses.create(body([])), OpenAI.BadRequestError);
    return "404 and 400";
  },
};

const scripted = {
  async image() {
    const url = `data:image/png;base64,${scenario.picture}`;
    const text = { type: "text", text: scenario.pictureQuestion };
    const content = [text, { type: "image_url", image_url: { url } }];
    const answer = await client.chat.completions.create(chatBody([user(content)]));
    const said = answer.choices[0].message.content;
    assert.ok(said.includes(scenario.pictureAnswer), said);
    return said;
  },

  async "responses image"() {
    const image_url = `data:image/png;base64,${scenario.picture}`;
    const text = { type: "input_text", text: scenario.pictureQuestion };
    const content = [text, { type: "input_image", image_url, detail: "auto" }];
    const { output_text } = await client.responses.create(body([user(content)]));
    assert.ok(output_text.includes(scenario.pictureAnswer), output_text);
    return output_text;
  },

  async cancellation() {
    const request = chatBody([user(scenario.endless)], { stream: true });
    const stream = await client.chat.completions.create(request);
    await stream[Symbol.asyncIterator]().next();
    return stopped(() => stream.controller.abort());
  },

  async "responses cancellation"() {
    const stream = await client.responses.create(body(scenario.endless, { stream: true }));
    await stream[Symbol.asyncIterator]().next();
    return stopped(() => stream.controller.abort());
  },
};

await main({ ...chatChecks, ...responsesChecks }, { scripted });
