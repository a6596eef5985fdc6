// Questions to begin with, which the model can answer.

const OF_THE_EMBEDDED_MODEL = ["How does the cache work?", "Who are you?", "What is Rootstock?"];
const OF_ANY_OTHER = [
  "What is the capital of France?",
  "Name the planets of the solar system.",
  "Write a Python function that reverses a string.",
];

/** `model` as /v1/models lists it; undefined before it is known. */
export function questionsFor(model) {
  return model?.root === "rootstock-demo" ? OF_THE_EMBEDDED_MODEL : OF_ANY_OTHER;
}
