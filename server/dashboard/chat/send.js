// One streamed request to the chat API, and its figures.

import { ask } from "../net/api.js";
import { events } from "../net/events.js";

const LEAST_SECONDS = 0.02; // of generating, for a rate that means something

/**
 * Requests `answers.length` answers, adds their text to the messages as it arrives, and calls
 * `onChange` after each piece. All are one request with `n`, because a browser opens at most six
 * connections to a host. `fields` are further fields of its body. Returns figures: tokens, times in
 * seconds, and the rate, null if all came at once. Throws what ask() throws, or the stream's error.
 */
export async function send({ messages, fields, answers, signal, onChange }) {
  const sent = performance.now();
  const asked = {
    messages, n: answers.length, stream: true, stream_options: { include_usage: true }, return_progress: true,
  };
  const response = await ask("v1/chat/completions", { signal, json: { ...fields, ...asked } });
  let first = null;
  let usage = null;
  for await (const data of events(response)) {
    if (data === "[DONE]") continue; // to the end, or the browser would call it broken off
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    for (const answer of answers) answer.progress = chunk.prompt_progress ?? null;
    for (const choice of chunk.choices) {
      if (note(answers[choice.index], choice)) first ??= performance.now();
    }
    onChange();
  }
  return figures(usage, sent, first ?? performance.now(), performance.now());
}

/** Whether the choice brought anything. */
function note(answer, { delta, finish_reason }) {
  const [text, reasoning] = [delta.content ?? "", delta.reasoning_content ?? ""];
  const calls = delta.tool_calls ?? [];
  answer.text += text;
  answer.reasoning += reasoning;
  for (const { index, id, function: part } of calls) {
    answer.calls[index] ??= { id, name: part.name, arguments: "" };
    answer.calls[index].arguments += part.arguments ?? "";
  }
  answer.finish = finish_reason ?? answer.finish;
  return text !== "" || reasoning !== "" || calls.length > 0;
}

function figures(usage, sent, first, ended) {
  const written = usage?.completion_tokens ?? 0;
  const writing = (ended - first) / 1000;
  return {
    prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    written,
    drafted: usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0,
    firstToken: (first - sent) / 1000,
    perSecond: writing >= LEAST_SECONDS ? written / writing : null, // all came at once
  };
}
