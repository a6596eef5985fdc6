// A chat with this daemon.

import { oncePerFrame } from "../parts/frame.js";
import { Component, html } from "../parts/html.js";
import { Dialogue } from "./dialogue.js";
import { ChooseImages, Images, pastedFiles, readImages, refusal } from "./images.js";
import { Answer, Question, ToolResult } from "./message.js";
import { NO_OPTIONS, Options } from "./options.js";
import { questionsFor } from "./questions.js";
import { SUGGESTION } from "./tool.js";

const AT_ONCE = 8;

export class Playground extends Component {
  state = { draft: "", images: [], reading: 0, problems: [], options: NO_OPTIONS };
  redraw = oncePerFrame(() => this.forceUpdate());
  dialogue = new Dialogue(this.redraw);
  isAtEnd = true;

  componentDidMount() {
    this.onEscape = (event) => this.stopOn(event);
    document.addEventListener("keydown", this.onEscape);
  }

  componentDidUpdate() {
    const { scrollHeight } = this.list;
    if (scrollHeight !== this.height && this.isAtEnd) this.list.scrollTop = scrollHeight;
    this.height = scrollHeight;
  }

  componentWillUnmount() {
    document.removeEventListener("keydown", this.onEscape);
    this.dialogue.stop();
  }

  render({ model }, { options }) {
    const path = this.dialogue.conversation.path();
    const questions = questionsFor(model);
    return html`
      <section class="playground" aria-labelledby="playground"
               onDragOver=${(event) => this.onDrag(event)} onDrop=${(event) => this.onDrop(event)}
               ref=${(section) => (this.section = section)}>
        <header>
          <h2 id="playground">Playground</h2>
          ${path.length > 0 && html`
            <button class="quiet" onClick=${() => this.begin()}>New chat</button>`}
        </header>
        <${Options} options=${options} model=${model}
                    onChange=${(changed) => this.setState({ options: changed })} />
        <ol class="messages" ref=${(list) => (this.list = list)} tabindex="0"
            aria-label="The conversation" onScroll=${() => this.noteScroll()}>
          ${path.length === 0 && html`
            <${Welcome} suggestions=${options.offersTool ? [SUGGESTION, ...questions] : questions}
                        onPick=${(text) => this.say(text, 1)} />`}
          ${path.map((message) => this.message(message))}
        </ol>
        ${this.composer()}
      </section>`;
  }

  message(message) {
    const { dialogue } = this;
    const shared = {
      key: message.id,
      message,
      siblings: dialogue.conversation.siblings(message),
      isBusy: dialogue.running !== null,
      onChoose: (other) => {
        dialogue.conversation.choose(other);
        this.forceUpdate();
      },
    };
    if (message.role === "tool") return html`<${ToolResult} ...${shared} />`;
    return message.role === "user"
      ? html`<${Question} ...${shared} onEdit=${(text) => this.ask(message.parent, text, message.images, 1)} />`
      : html`<${Answer} ...${shared} onRetry=${() => this.retry(message)} />`;
  }

  composer() {
    const { draft, images, reading, problems } = this.state;
    const isUnready = reading > 0 || !(draft.trim() || images.length);
    return html`
      <form class="composer" onSubmit=${(event) => this.submit(event)}>
        <${Images} images=${images} onRemove=${(image) => this.remove(image)} />
        ${problems.map((problem) => html`<p class="problem" role="alert">${problem}</p>`)}
        <textarea rows="2" aria-label="Your message" placeholder="Say something" value=${draft}
                  ref=${(textarea) => (this.textarea = textarea)}
                  onInput=${(event) => this.setState({ draft: event.target.value })}
                  onPaste=${(event) => this.onPaste(event)}
                  onKeyDown=${(event) => this.onKey(event)}></textarea>
        <div class="row">
          ${this.dialogue.running
            ? html`<button type="button" class="primary" aria-keyshortcuts="Escape"
                           onClick=${() => this.dialogue.stop()}>Stop <kbd>Esc</kbd></button>`
            : html`
              <button class="primary" disabled=${isUnready}>Send</button>
              <button type="button" disabled=${isUnready} title="${AT_ONCE} answers to one prompt"
                      onClick=${() => this.say(draft, AT_ONCE)}>Send to ${AT_ONCE} at once</button>`}
          <${ChooseImages} model=${this.props.model} onFiles=${(files) => this.attach(files)} />
        </div>
      </form>`;
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
  }

  onPaste(event) {
    const files = pastedFiles(event.clipboardData);
    if (!files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  /** Without this the browser would leave the page for the file. */
  onDrag(event) {
    if (event.dataTransfer.types.includes("Files")) event.preventDefault();
  }

  onDrop(event) {
    const files = [...event.dataTransfer.files];
    if (!files.length) return;
    event.preventDefault();
    this.attach(files);
  }

  /** Images for the message that is being written, after those that it has. */
  async attach(files) {
    const reason = refusal(this.props.model);
    if (reason) return this.setState({ problems: [reason] });
    this.setState(({ reading }) => ({ reading: reading + 1 }));
    const { images, problems } = await readImages(files);
    this.setState((state) => ({
      images: [...state.images, ...images], problems, reading: state.reading - 1,
    }));
  }

  remove(image) {
    this.setState(({ images }) => ({ images: images.filter((one) => one !== image) }));
    this.textarea.focus();
  }

  /** Only if nothing outside the playground has the focus, which may need the key itself. */
  stopOn({ key, target, isComposing }) {
    const isOurs = this.section.contains(target) || target === document.body;
    if (key === "Escape" && isOurs && !isComposing) this.dialogue.stop();
  }

  submit(event) {
    event.preventDefault();
    this.say(this.state.draft, 1);
  }

  begin() {
    this.dialogue.stop();
    this.dialogue = new Dialogue(this.redraw);
    this.forceUpdate();
  }

  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < 40;
  }

  /** Continue after the last message that is shown. */
  say(text, together) {
    const { images, reading } = this.state;
    if (reading || !(text.trim() || images.length) || this.dialogue.running) return;
    this.setState({ draft: "", images: [], problems: [] });
    this.ask(this.dialogue.conversation.path().at(-1)?.id ?? null, text.trim(), images, together);
  }

  ask(parent, text, images, together) {
    this.isAtEnd = true;
    for (const options of this.section.querySelectorAll("details.options")) options.open = false;
    this.dialogue.ask(parent, text, images, together, this.options());
  }

  retry(message) {
    this.isAtEnd = true;
    this.dialogue.retry(message, this.options());
  }

  options() {
    return { ...this.state.options, model: this.props.model?.id };
  }
}

function Welcome({ suggestions, onPick }) {
  return html`
    <li class="welcome">
      <p class="muted">Chat with this daemon and watch its cache: the second message finds the first
        there. Edit an earlier message to begin a branch: both share what comes before it.</p>
      ${suggestions.map((text) => html`
        <button key=${text} onClick=${() => onPick(text)}>${text}</button>`)}
    </li>`;
}
