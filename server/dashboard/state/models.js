// The models as /admin/models has them, and the requests that load and unload them.

import { ask, reason } from "../net/api.js";

/** The one of that name, or the first. */
export function modelOf(models, name) {
  return models.find(({ id }) => id === name) ?? models[0];
}

/** Whether a request to load it makes sense now. */
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

/** The model's state, in words. Before it is loaded it is fetched, if need be, and its memory is measured. */
export function wordsOf({ state, progress }) {
  if (state !== "unloaded" || progress === null) return WORDS[state];
  return progress.endsWith(" fetched") ? "is being fetched" : "is being prepared";
}

/** Loads and unloads models, and keeps the daemon's refusals. `onChange` is called for each change. */
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

  /** Why the model has failed, or why it was not loaded. */
  problem({ id, state, failure }) {
    if (state === "failed") return failure;
    return state === "unloaded" ? this.problems.get(id) : undefined;
  }
}
