"""Tools that clients run themselves and whose calls are items of kinds of their own, as
`apply_patch` and `shell` are. To the model each is a function.

Names, parameters and items are those of OpenAI's guides on apply_patch, shell, local shell and tool
search, and of the types of its Python library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TOOL_SEARCH = "tool_search"
"""The name of the function by which a model looks for tools."""

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the calls of one of these tools are written. Its function has the name of the tool's
    type. `fields` makes the fields of a call's item of its arguments, and returns None for
    arguments that make no such item; `arguments` makes them of an item's fields.
    """

    tool: str  # the tool's type
    item: str  # the type of its calls' items
    prefix: str  # of the items' ids
    description: str
    parameters: Mapping[str, Any]
    fields: Callable[[Mapping[str, Any]], Fields | None]
    arguments: Callable[[Mapping[str, Any]], Mapping[str, Any]]


def _object(required: Sequence[str], **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _text(description: str) -> Mapping[str, Any]:
    return {"type": "string", "description": description}


def _texts(description: str) -> Mapping[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}


def _count(description: str) -> Mapping[str, Any]:
    return {"type": "integer", "description": description}


OPERATIONS = ("create_file", "update_file", "delete_file")


def _operation(arguments: Mapping[str, Any]) -> Fields | None:
    match arguments:
        case {"type": "delete_file" as kind, "path": str(path)}:
            return {"operation": {"type": kind, "path": path}}
        case {"type": str(kind), "path": str(path), "diff": str(diff)} if kind in OPERATIONS:
            return {"operation": {"type": kind, "path": path, "diff": diff}}
        case _:
            return None


def _commands(arguments: Mapping[str, Any]) -> Fields | None:
    commands = arguments.get("commands")
    if not _are_texts(commands):
        return None
    limits = {name: _integer(arguments.get(name)) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": commands, **limits}, "environment": {"type": "local"}}


def _command(arguments: Mapping[str, Any]) -> Fields | None:
    if not _are_texts(arguments.get("command")):
        return None
    action: Fields = {"type": "exec", "command": arguments["command"], "env": {}}
    match arguments.get("env"):
        case dict(env):
            action["env"] = {name: value for name, value in env.items() if isinstance(value, str)}
    action["timeout_ms"] = _integer(arguments.get("timeout_ms"))
    for name in ("user", "working_directory"):
        value = arguments.get(name)
        action[name] = value if isinstance(value, str) else None
    return {"action": action}


def _search(arguments: Mapping[str, Any]) -> Fields:
    return {"arguments": dict(arguments), "execution": "client"}


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _of_action(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    action: Mapping[str, Any] = fields.get("action") or {}
    return {name: value for name, value in action.items() if value and name != "type"}


def _of_operation(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    operation: Mapping[str, Any] = fields.get("operation") or {}
    return operation


def _of_search(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = fields.get("arguments")
    return arguments if isinstance(arguments, dict) else {}


FORMS: Sequence[CallForm] = (
    CallForm(
        tool="apply_patch",
        item="apply_patch_call",
        prefix="apc",
        description="Create, update or delete a file. Each call has one operation.",
        parameters=_object(
            ["type", "path"],
            type={"type": "string", "enum": list(OPERATIONS)},
            path=_text("Path of the file, relative to the root of the workspace."),
            diff=_text(
                "To create a file: its lines, each after a '+'. To update one: its sections in V4A "
                "format, each after a line of '@@', with lines that begin with ' ' (unchanged), "
                "'-' (removed) or '+' (added). To delete one: left out."
            ),
        ),
        fields=_operation,
        arguments=_of_operation,
    ),
    CallForm(
        tool="shell",
        item="shell_call",
        prefix="sh",
        description="Run shell commands, and return what they print and their exit codes.",
        parameters=_object(
            ["commands"],
            commands=_texts("The commands, in the order in which they run."),
            timeout_ms=_count("The longest time that they may run, in milliseconds."),
            max_output_length=_count("The most characters of output that are returned."),
        ),
        fields=_commands,
        arguments=_of_action,
    ),
    CallForm(
        tool="local_shell",
        item="local_shell_call",
        prefix="lsh",
        description="Run a command on the user's machine, and return what it prints.",
        parameters=_object(
            ["command"],
            command=_texts("The program and its arguments, as in ['bash', '-lc', 'ls']."),
            env={
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Environment variables of the command.",
            },
            timeout_ms=_count("The longest time that it may run, in milliseconds."),
            user=_text("The user to run it as."),
            working_directory=_text("The directory to run it in."),
        ),
        fields=_command,
        arguments=_of_action,
    ),
    CallForm(
        tool=TOOL_SEARCH,
        item="tool_search_call",
        prefix="tsc",
        description="Search for tools that are not known yet. They can be called afterwards.",
        parameters=_object(["query"], query=_text("What the tools are to do.")),
        fields=_search,
        arguments=_of_search,
    ),
)
FORM_BY_TOOL = {form.tool: form for form in FORMS}
FORM_BY_ITEM = {form.item: form for form in FORMS}


def output_text(output: object, status: str | None) -> str:
    """The text of what a call of one of these tools returned: a text, or a shell's chunks of
    output. A status other than `completed` stands before it.
    """
    match output:
        case str():
            text = output
        case list():
            text = "\n".join(_chunk_text(each) for each in output if isinstance(each, dict))
        case _:
            text = ""
    if not text:
        return status or ""
    return text if status in {None, "completed"} else f"{status}: {text}"


def _chunk_text(chunk: Mapping[str, Any]) -> str:
    said = [
        text.rstrip("\n") for key in ("stdout", "stderr") if isinstance(text := chunk.get(key), str)
    ]
    match chunk.get("outcome"):
        case {"exit_code": int(code)}:
            said.append(f"(exit code {code})")
        case {"type": "timeout"}:
            said.append("(timed out)")
    return "\n".join(filter(None, said))
