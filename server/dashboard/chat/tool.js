// A tool to try: harmless, and answered by the page itself.

const NAME = "get_time"; // a name of the kind that the embedded model was trained on

export const SUGGESTION = "Get the time.";

export const TOOL = {
  type: "function",
  function: {
    name: NAME,
    description: "Get the date and time in a time zone.",
    parameters: {
      type: "object",
      properties: {
        timezone: { type: "string", description: "An IANA name such as Europe/Berlin; UTC without." },
      },
    },
  },
};

/** What the model is told. What it got wrong is told as well, so that it can try again. */
export function result({ name, arguments: text }) {
  if (name !== NAME) return `Error: there is no tool ${name}, only ${NAME}.`;
  try {
    return time(JSON.parse(text || "{}").timezone ?? "UTC");
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Throws RangeError for a time zone that does not exist. */
function time(timeZone) {
  const format = { dateStyle: "full", timeStyle: "long", timeZone };
  return new Intl.DateTimeFormat("en-GB", format).format(new Date());
}
