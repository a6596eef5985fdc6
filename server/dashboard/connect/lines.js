// What to type to use this daemon from elsewhere: each line works as it stands.

import { address, hasKey } from "../net/api.js";
import { quoted } from "../parts/shell.js";

const PLACEHOLDER = "YOUR_KEY";

export const baseUrl = () => address("v1");

/** A chat, as it is asked for without a client; of the first model where none is named. */
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

/** For what reads OpenAI's variables. */
export function environment() {
  return `export OPENAI_BASE_URL=${quoted(baseUrl())} OPENAI_API_KEY=${hasKey() ? PLACEHOLDER : "none"}`;
}

/** An agent that is told all it needs, for this one time. */
export function launch(agent, model) {
  const key = hasKey() ? `ROOTSTOCK_CLIENT_API_KEY=${PLACEHOLDER} ` : "";
  const named = model === undefined ? "" : ` --model ${quoted(model)}`;
  return `${key}rootstock launch ${quoted(agent)} --url ${quoted(baseUrl())}${named}`;
}
