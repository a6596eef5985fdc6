// A tool to try: harmless, and answered by the page itself.

const NAME = "get_time"; // a name of the kind that the embedded model was trained on

export const SUGGESTION = "Get the time in Paris.";

/** The embedded model calls it rightly with these very descriptions, and not with some others. */
export const TOOL = {
  type: "function",
  function: {
    name: NAME,
    description: "Get the time in a city or time zone.",
    parameters: {
      type: "object",
      properties: {
        timezone: { type: "string", description: "A city, or a time zone." },
      },
    },
  },
};

/** The result of a call, for the model. An error is a result, too, so that the model can try again. */
export function result({ name, arguments: text }) {
  if (name !== NAME) return `Error: there is no tool ${name}, only ${NAME}.`;
  try {
    return time(zoneOf(JSON.parse(text || "{}").timezone ?? "UTC"));
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** The time zone of a city, such as Europe/Paris of Paris; any other text as it is. */
function zoneOf(text) {
  const city = text.trim().replaceAll(" ", "_").toLowerCase();
  return Intl.supportedValuesOf("timeZone")
    .find((zone) => zone.split("/").at(-1).toLowerCase() === city) ?? text;
}

/** Throws RangeError for a time zone that does not exist. */
function time(timeZone) {
  const format = { dateStyle: "full", timeStyle: "long", timeZone };
  return new Intl.DateTimeFormat("en-GB", format).format(new Date());
}
