// Server-sent events out of a response that is read with fetch: EventSource could send no key.

/** The data of each event, as text. Comments, which keep the stream open, are left out. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (unread + value).split("\n\n");
      unread = parts.pop();
      for (const part of parts) {
        const data = dataOf(part);
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted stream has been cancelled already
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice("data:".length).trimStart()).join("\n");
}
