"""Conversations with images, generated, as the body of each dialect."""

import base64
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.contract.fake_engine import IMAGE

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@dataclass
class Conversation:
    """A generated conversation: turns of a user and of tools, whose parts are texts and images."""

    turns: list[tuple[str, list[str | bytes]]]

    @property
    def images(self) -> list[bytes]:
        return [part for _, parts in self.turns for part in parts if isinstance(part, bytes)]

    @property
    def texts(self) -> list[str]:
        return [part for _, parts in self.turns for part in parts if isinstance(part, str)]

    def chat(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for number, (role, parts) in enumerate(self.turns):
            content = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image_url", "image_url": {"url": data_url(part)}}
                for part in parts
            ]
            if role == "tool":
                call = {**CALL, "id": f"call_{number}"}
                messages.append({"role": "assistant", "tool_calls": [call]})
                messages.append({"role": role, "tool_call_id": call["id"], "content": content})
            else:
                messages.append({"role": role, "content": content})
        return {"messages": messages, "max_tokens": 1}

    def messages(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for number, (role, parts) in enumerate(self.turns):
            content: list[dict[str, Any]] = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {
                    "type": "image",
                    "source": {"type": "base64", "data": base64.b64encode(part).decode()},
                }
                for part in parts
            ]
            if role == "tool":
                id = f"call_{number}"
                use = {"type": "tool_use", "id": id, "name": "look", "input": {}}
                messages.append({"role": "assistant", "content": [use]})
                content = [{"type": "tool_result", "tool_use_id": id, "content": content}]
            messages.append({"role": "user", "content": content})
        return {"messages": messages, "max_tokens": 1}

    def responses(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for number, (role, parts) in enumerate(self.turns):
            content = [
                {"type": "input_text", "text": part}
                if isinstance(part, str)
                else {"type": "input_image", "image_url": data_url(part)}
                for part in parts
            ]
            if role == "tool":
                id = f"call_{number}"
                call = {"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"}
                items.append(call)
                items.append({"type": "function_call_output", "call_id": id, "output": content})
            else:
                items.append({"role": role, "content": content})
        return {"input": items, "max_output_tokens": 1}

    def ollama(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for role, parts in self.turns:
            if role == "tool":
                call = {"function": {"name": "look", "arguments": {}}}
                messages.append({"role": "assistant", "tool_calls": [call]})
            said = "".join(part for part in parts if isinstance(part, str))
            shown = [base64.b64encode(part).decode() for part in parts if isinstance(part, bytes)]
            messages.append({"role": role, "content": said, "images": shown})
        return {"messages": messages, "stream": False, "options": {"num_predict": 1}}


CONTENTS: st.SearchStrategy[str | bytes] = st.sampled_from(
    ["", "a", "b" * 5, IMAGE + b"x", IMAGE + b"yy", IMAGE + b"zzz"]
)
TURNS = st.tuples(st.sampled_from(["user", "tool"]), st.lists(CONTENTS, min_size=1, max_size=3))
CONVERSATIONS = st.lists(TURNS, min_size=1, max_size=4).map(
    lambda turns: Conversation([("user", ["begin"]), *turns])
)
