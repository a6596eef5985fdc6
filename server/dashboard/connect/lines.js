// Lines that use this daemon from elsewhere. Each works as it stands.

import { address, hasKey } from "../net/api.js";
import { quoted } from "../parts/shell.js";

const PLACEHOLDER = "YOUR_KEY";

export const baseUrl = () => address("v1");

/** A chat request; without a model of the first one. */
export function curl(question, model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: question }] });
  return [
    `curl ${quoted(address("v1/chat/completions"))}`,
    ...(hasKey() ? [`-H 'Authorization: Bearer ${PLACEHOLDER}'`] : []),
    "-H 'Content-Type: application/json'",
    `-d ${quoted(body)}`,
  ].join(" \\\n  ");
}

/** For the openai package; other clients of OpenAI's have the same three settings. */
export function python(model) {
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(baseUrl())}, api_key="${hasKey() ? PLACEHOLDER : "none"}")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "Hello"}],
)
print(answer.choices[0].message.content)`;
}

/** For programs that read OpenAI's variables. */
export function environment() {
  return `export OPENAI_BASE_URL=${quoted(baseUrl())} OPENAI_API_KEY=${hasKey() ? PLACEHOLDER : "none"}`;
}

/** `rootstock launch` for an agent; `command` is what has to be typed for `rootstock`. */
export function launchLine(command, agent, model) {
  const key = hasKey() ? `ROOTSTOCK_CLIENT_API_KEY=${PLACEHOLDER} ` : "";
  const named = model === undefined ? "" : ` --model ${quoted(model)}`;
  return `${key}${command} launch ${quoted(agent)} --url ${quoted(baseUrl())}${named}`;
}
