// The course of a conversation: questions, answers, calls of the tool, and retries.

import { reason } from "../net/api.js";
import { Conversation } from "./conversation.js";
import { send } from "./send.js";
import { result, TOOL } from "./tool.js";

const MOST_ROUNDS = 5; // of calls, before the model must answer

/**
 * One conversation and the request that is running for it, if any. `onChange` is called whenever
 * there is something new to show. `options` are `model`, `system`, `temperature` and `maxTokens` (null where
 * the daemon decides) and `offersTool`.
 */
export class Dialogue {
  conversation = new Conversation();
  running = null;

  constructor(onChange) {
    this.onChange = onChange;
  }

  stop() {
    this.running?.abort();
  }

  /** A message after `parent` and `together` answers to it, of which the first is shown. */
  async ask(parent, text, images, together, options) {
    const question = this.conversation.add(parent, "user", text, { images });
    await this.run((signal) => this.answer(question, together, MOST_ROUNDS, options, signal));
  }

  /** The request of this answer once more. What had begun to say something stays as a branch. */
  async retry({ parent, together }, options) {
    for (const answer of together) this.conversation.dropEmpty(answer);
    const asked = this.conversation.get(parent);
    await this.run((signal) => this.answer(asked, together.length, MOST_ROUNDS, options, signal));
  }

  async run(act) {
    this.running = new AbortController();
    try {
      await act(this.running.signal);
    } finally {
      this.running = null;
      this.onChange();
    }
  }

  async answer(asked, count, rounds, options, signal) {
    const { conversation } = this;
    const messages = conversation.upTo(asked, options.system.trim());
    const answers = Array.from({ length: count }, () => conversation.add(asked.id, "assistant", "",
      { reasoning: "", calls: [], finish: null, state: "writing" }));
    for (const answer of answers) answer.together = answers;
    conversation.choose(answers[0]);
    this.onChange();
    const outcome = await this.outcome({ messages, answers, signal, fields: fields(options, rounds) });
    for (const answer of answers) Object.assign(answer, outcome);
    if (outcome.state !== "done") return;
    const unanswered = answers.filter(({ finish }) => finish === "tool_calls");
    await Promise.all(unanswered.map((answer) => this.goOn(answer, rounds - 1, options, signal)));
  }

  /** The page is the tool: it answers, and the model goes on from there. */
  async goOn(answer, rounds, options, signal) {
    let last = answer;
    for (const call of answer.calls) {
      last = this.conversation.add(last.id, "tool", result(call), { call });
    }
    await this.answer(last, 1, rounds, options, signal);
  }

  async outcome(request) {
    try {
      return { state: "done", figures: await send({ ...request, onChange: this.onChange }) };
    } catch (error) {
      if (request.signal.aborted) return { state: "stopped" };
      return { state: "failed", problem: reason(error) };
    }
  }
}

/** What is undefined is not sent. */
function fields({ model, temperature, maxTokens, offersTool }, rounds) {
  return {
    model,
    temperature: temperature ?? undefined,
    max_tokens: maxTokens ?? undefined,
    tools: offersTool ? [TOOL] : undefined,
    tool_choice: offersTool && rounds === 0 ? "none" : undefined,
  };
}
