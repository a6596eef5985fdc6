// A chat with this daemon, so that the picture beside it has something to show.

import { reason } from "../net/api.js";
import { Component, html } from "../parts/html.js";
import { Conversation } from "./conversation.js";
import { Answer, Question } from "./message.js";
import { send } from "./send.js";

const AT_ONCE = 8;
const SUGGESTIONS = ["How does the cache work?", "Who are you?", "What is Rootstock?"];

export class Playground extends Component {
  state = { draft: "", system: "", busy: null };
  conversation = new Conversation();

  componentDidUpdate() {
    const { scrollHeight } = this.list;
    if (scrollHeight !== this.height && this.isAtEnd) this.list.scrollTop = scrollHeight;
    this.height = scrollHeight;
  }

  componentWillUnmount() {
    this.state.busy?.abort();
  }

  isAtEnd = true;

  render(_, { busy }) {
    const path = this.conversation.path();
    return html`
      <section class="playground" aria-labelledby="playground">
        <header>
          <h2 id="playground">Playground</h2>
          ${path.length > 0 && html`
            <button class="quiet" onClick=${() => this.begin()}>New chat</button>`}
        </header>
        <${System} text=${this.state.system} onInput=${(system) => this.setState({ system })} />
        <ol class="messages" ref=${(list) => (this.list = list)} tabindex="0"
            aria-label="The conversation" onScroll=${() => this.noteScroll()}>
          ${path.length === 0 && html`<${Welcome} onPick=${(text) => this.say(text, 1)} />`}
          ${path.map((message) => this.message(message, busy !== null))}
        </ol>
        ${this.composer(busy)}
      </section>`;
  }

  message(message, isBusy) {
    const siblings = this.conversation.siblings(message);
    const choose = (other) => {
      this.conversation.choose(other);
      this.forceUpdate();
    };
    return message.role === "user"
      ? html`<${Question} key=${message.id} message=${message} siblings=${siblings} isBusy=${isBusy}
                          onChoose=${choose}
                          onEdit=${(text) => this.ask(message.parent, text, 1)} />`
      : html`<${Answer} key=${message.id} message=${message} siblings=${siblings}
                        onChoose=${choose} />`;
  }

  composer(busy) {
    const { draft } = this.state;
    const isEmpty = !draft.trim();
    return html`
      <form class="composer" onSubmit=${(event) => this.submit(event)}>
        <textarea rows="2" aria-label="Your message" placeholder="Say something" value=${draft}
                  onInput=${(event) => this.setState({ draft: event.target.value })}
                  onKeyDown=${(event) => this.onKey(event)}></textarea>
        <div class="row">
          ${busy
            ? html`<button type="button" class="primary" onClick=${() => busy.abort()}>Stop</button>`
            : html`
              <button class="primary" disabled=${isEmpty}>Send</button>
              <button type="button" disabled=${isEmpty} title="${AT_ONCE} answers to one prompt"
                      onClick=${() => this.say(draft, AT_ONCE)}>Send to ${AT_ONCE} at once</button>`}
        </div>
      </form>`;
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
  }

  submit(event) {
    event.preventDefault();
    this.say(this.state.draft, 1);
  }

  begin() {
    this.state.busy?.abort();
    this.conversation = new Conversation();
    this.forceUpdate();
  }

  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
  }

  /** Go on behind what is shown. */
  say(text, answers) {
    if (!text.trim() || this.state.busy) return;
    this.setState({ draft: "" });
    this.ask(this.conversation.path().at(-1)?.id ?? null, text.trim(), answers);
  }

  /** A message behind `parent` and as many answers to it, of which the first is shown. */
  async ask(parent, text, together) {
    const { conversation } = this;
    const question = conversation.add(parent, "user", text);
    const messages = conversation.upTo(question, this.state.system.trim());
    const notes = { reasoning: "", finish: null, state: "writing", together };
    const answers = Array.from({ length: together }, () =>
      conversation.add(question.id, "assistant", "", notes));
    conversation.choose(answers[0]);
    const busy = new AbortController();
    this.isAtEnd = true;
    this.setState({ busy });
    const outcome = await this.outcome(messages, answers, busy.signal);
    for (const answer of answers) Object.assign(answer, outcome);
    this.setState({ busy: null });
  }

  async outcome(messages, answers, signal) {
    const onChange = () => this.forceUpdate();
    try {
      return { state: "done", figures: await send({ messages, answers, signal, onChange }) };
    } catch (error) {
      if (signal.aborted) return { state: "stopped" };
      return { state: "failed", problem: reason(error) };
    }
  }
}

function Welcome({ onPick }) {
  return html`
    <li class="welcome">
      <p class="muted">Chat with this daemon and watch the picture: the second message finds the first
        in the cache. Edit an earlier one and send it again: the branches share their beginning.</p>
      ${SUGGESTIONS.map((text) => html`
        <button key=${text} onClick=${() => onPick(text)}>${text}</button>`)}
    </li>`;
}

function System({ text, onInput }) {
  return html`
    <details class="system">
      <summary>System prompt${text.trim() ? "" : " (none)"}</summary>
      <textarea rows="4" aria-label="System prompt" value=${text}
                placeholder="What every chat begins with, and so shares"
                onInput=${(event) => onInput(event.target.value)}></textarea>
    </details>`;
}
