// The models as /admin/models tells of them, and what is asked of them.

import { ask, reason } from "../net/api.js";

/** The one of that name, or the first. */
export function modelOf(models, name) {
  return models.find(({ id }) => id === name) ?? models[0];
}

/** Whether it may be asked to load. */
export function canLoad({ state, progress }) {
  return (state === "unloaded" || state === "failed") && progress === null;
}

const WORDS = {
  unloaded: "not loaded",
  loading: "is being loaded",
  ready: "ready",
  draining: "is being unloaded",
  failed: "has failed",
};

/** The model's state, in words. */
export function wordsOf({ state, progress }) {
  if (state !== "unloaded" || progress === null) return WORDS[state];
  return progress.endsWith("fetched") ? "is being fetched" : "is about to be loaded";
}

/** Loads and unloads, and keeps what the daemon had against it. `onChange` is called for both. */
export class Acts {
  pending = new Set(); // names of models
  problems = new Map(); // by name

  constructor(onChange) {
    this.onChange = onChange;
  }

  /** `verb` is "load" or "unload". */
  async act(verb, name) {
    this.pending.add(name);
    this.problems.delete(name);
    this.onChange();
    try {
      await ask(`admin/models/${verb}?${new URLSearchParams({ model: name })}`, { method: "POST" });
    } catch (error) {
      this.problems.set(name, reason(error));
    }
    this.pending.delete(name);
    this.onChange();
  }

  /** What stands in the way of a model: why it has failed, or why it was not loaded. */
  problem({ id, state, failure }) {
    if (state === "failed") return failure;
    return state === "unloaded" ? this.problems.get(id) : undefined;
  }
}
