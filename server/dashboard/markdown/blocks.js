// An answer as blocks of Markdown, parsed while it is being generated. marked says where blocks are and
// what is in them; what it says becomes elements elsewhere, never markup.

import { Lexer } from "../vendor/marked.mjs";

const PIECE = 2_000;
const MOST_OPEN = 10_000; // beyond it a block that is no code is cut: to read it again costs too much

/**
 * `closed` are tokens of marked's that stay as they are, `open` those that the next piece of text
 * may change. Only these are read again, so an answer costs in all what its blocks cost.
 */
export class Blocks {
  closed = [];
  open = [];
  unread = "";

  append(text) {
    for (let at = 0; at < text.length; at += PIECE) {
      this.unread += text.slice(at, at + PIECE).replaceAll("\r", "");
      this.read();
    }
  }

  read() {
    const tokens = tokensOf(this.unread);
    const { count, length } = finished(tokens, this.unread);
    this.closed.push(...shown(tokens.slice(0, count)));
    this.open = shown(tokens.slice(count));
    this.unread = this.unread.slice(length);
    if (this.unread.length > MOST_OPEN && this.open.at(-1)?.type !== "code") this.cut();
  }

  /** The position after its last whole line, if it has one. A list continues as another list. */
  cut() {
    const end = this.unread.lastIndexOf("\n") + 1 || this.unread.length;
    this.closed.push(...shown(tokensOf(this.unread.slice(0, end))));
    this.unread = this.unread.slice(end);
    this.open = shown(tokensOf(this.unread));
  }
}

/** What marked cannot read (it recurses, and loops count as errors) is text. */
function tokensOf(text) {
  try {
    return new Lexer().lex(text);
  } catch {
    return [{ type: "unreadable", raw: text }];
  }
}

/** Without what stands between blocks. */
function shown(tokens) {
  return tokens.filter(({ type }) => type !== "space" && type !== "def");
}

/**
 * How many of the tokens are finished, and the length of their text: those before the last block
 * whose first line is whole. A line that is still being generated may yet belong to either block.
 */
function finished(tokens, text) {
  const lastBreak = text.lastIndexOf("\n");
  let [count, length, at] = [0, 0, 0];
  for (const [index, token] of tokens.entries()) {
    if (at > lastBreak || !text.startsWith(token.raw, at)) break;
    if (token.type !== "space") [count, length] = [index, at];
    at += token.raw.length;
  }
  return { count, length };
}
