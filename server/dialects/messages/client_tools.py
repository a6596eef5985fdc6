"""Tools of which Anthropic defines the parameters, and which the client runs.

Names and parameters are those of Anthropic's documentation of the bash tool, the text editor tool
and the memory tool. A call goes out as a `tool_use` with the client's name of the tool, as any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One of these tools. Its versions' types begin with `prefix`."""

    prefix: str
    name: str
    description: str
    parameters: Mapping[str, Any]


def _text(description: str) -> Mapping[str, Any]:
    return {"type": "string", "description": description}


def _object(required: Sequence[str], **properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(*names: str) -> Mapping[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


EDITS: Mapping[str, Mapping[str, Any]] = {
    "file_text": _text("For create: the text of the file."),
    "insert_line": {
        "type": "integer",
        "description": "For insert: the line after which the text comes; 0 is the beginning.",
    },
    "insert_text": _text("For insert: the text."),
    "new_str": _text("For str_replace: the text that takes the place of `old_str`."),
    "old_str": _text("For str_replace: the text to replace, which must occur exactly once."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view of a file: its first and last line, from 1 on; -1 is the end.",
    },
}

OLD_EDITS: Mapping[str, Mapping[str, Any]] = {
    **{name: field for name, field in EDITS.items() if name != "insert_text"},
    "new_str": _text(
        "For str_replace: the text that takes the place of `old_str`. For insert: the text."
    ),
}
"""Those of the versions up to 20250124."""

EDITOR = "Look at, create and change text files."
EDITOR_PATH = _text("Path of the file or folder.")

CLIENT_TOOLS: Sequence[ClientTool] = (
    ClientTool(
        prefix="bash_20",
        name="bash",
        description="Run commands in a bash session that keeps its state between calls.",
        parameters=_object(
            [],
            command=_text("The command to run. Required unless the session is restarted."),
            restart={"type": "boolean", "description": "True restarts the session."},
        ),
    ),
    *(
        ClientTool(
            prefix=f"text_editor_{version}",
            name="str_replace_editor",
            description=EDITOR,
            parameters=_object(
                ["command", "path"],
                command=_commands("view", "create", "str_replace", "insert", "undo_edit"),
                path=EDITOR_PATH,
                **OLD_EDITS,
            ),
        )
        for version in ("20241022", "20250124")
    ),
    ClientTool(
        prefix="text_editor_20",
        name="str_replace_based_edit_tool",
        description=EDITOR,
        parameters=_object(
            ["command", "path"],
            command=_commands("view", "create", "str_replace", "insert"),
            path=EDITOR_PATH,
            **EDITS,
        ),
    ),
    ClientTool(
        prefix="memory_20",
        name="memory",
        description="Keep notes in files under /memories, which outlast the conversation.",
        parameters=_object(
            ["command"],
            command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_text("Path of the file or folder, under /memories. Not for rename."),
            old_path=_text("For rename: the path as it is."),
            new_path=_text("For rename: the path as it is to be."),
            **EDITS,
        ),
    ),
)


def client_tool(type: str) -> ClientTool | None:
    """The tool whose version has this type."""
    return next((tool for tool in CLIENT_TOOLS if type.startswith(tool.prefix)), None)
