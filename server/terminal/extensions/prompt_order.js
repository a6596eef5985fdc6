// The beginning of each extension that `rootstock launch` writes for an agent.

const DATE = /\bdate: /i;
const HEADING = /^\s*<\w+>\s*$|:\s*$/;

// A body of chat completions, with the end of its system message moved into the first user message:
// from the first line that names the folder or the date, with its heading. Chat templates write the
// tools between the two, so sessions in other folders share the system message and the tools.
function withFolderAfterTools(body, folder) {
  const [system, ...others] = body.messages ?? [];
  const user = others.find(message => message.role === "user");
  if (!["system", "developer"].includes(system?.role) || typeof system.content !== "string" || !user) {
    return body;
  }
  const lines = system.content.split("\n");
  let first = lines.findIndex(line => line.includes(folder) || DATE.test(line));
  while (first > 0 && HEADING.test(lines[first - 1])) first -= 1;
  if (first < 1) return body;
  const text = `<system-reminder>\n${lines.slice(first).join("\n").trim()}\n</system-reminder>\n\n`;
  const content =
    typeof user.content === "string" ? text + user.content : [{ type: "text", text }, ...user.content];
  const messages = [
    { ...system, content: lines.slice(0, first).join("\n").trimEnd() },
    ...others.map(message => (message === user ? { ...user, content } : message)),
  ];
  return { ...body, messages };
}
