"""ollama: chats and prompts."""

from typing import Any

from ollama import Client, ResponseError

from tests.clients import scenario
from tests.clients.checks import Daemon, Scripted, main, raised, stopped

TOOL = {"type": "function", "function": scenario.WEATHER_TOOL}
REPORT = {
    "type": "object",
    "properties": {"sky": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["sky", "degrees"],
}


def conversation(daemon: Daemon) -> str:
    messages: list[Any] = [_user(scenario.GREETING)]
    first = _chat(daemon, messages)
    last = _chat(daemon, [*messages, first.message, _user(scenario.FAREWELL)])
    assert first.message.content
    assert first.done_reason == "stop", first
    assert last.prompt_eval_count > first.prompt_eval_count
    return str(first.message.content)


def stream(daemon: Daemon) -> str:
    *parts, last = _chat(daemon, [_user(scenario.GREETING)], stream=True)
    text = "".join(part.message.content for part in parts)
    assert text == _chat(daemon, [_user(scenario.GREETING)]).message.content, text
    assert last.eval_count > 0
    assert last.total_duration >= last.eval_duration > 0
    return f"{len(parts)} lines: {text}"


def tool_loop(daemon: Daemon) -> str:
    station = scenario.WeatherStation()
    messages: list[Any] = [_user(scenario.QUESTION)]
    while (message := _chat(daemon, messages, tools=[TOOL]).message).tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            result = station.get_weather(**call.function.arguments)
            name = call.function.name
            messages.append({"role": "tool", "tool_name": name, "content": result})
    return station.check(message.content)


def prompt(daemon: Daemon) -> str:
    """Whole and streamed."""
    fields = {"model": daemon.model, "prompt": scenario.GREETING, "options": _options()}
    whole = _client(daemon).generate(**fields)
    parts = _client(daemon).generate(**fields, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    assert whole.response
    return str(whole.response)


def models(daemon: Daemon) -> str:
    """Listed, loaded, and shown by the name that Ollama's clients make of theirs."""
    client = _client(daemon)
    assert daemon.model in {model.model for model in client.list().models}  # it has other names
    assert daemon.model in {model.model for model in client.ps().models}
    capabilities = client.show(f"{daemon.model}:latest").capabilities
    assert {"completion", "tools"} <= set(capabilities)
    return ", ".join(capabilities)


def errors(daemon: Daemon) -> str:
    unknown = Daemon(daemon.root, scenario.UNKNOWN)
    missing: Any = raised(ResponseError, lambda: _chat(unknown, [_user(scenario.GREETING)]))
    assert (missing.status_code, scenario.UNKNOWN in missing.error) == (404, True), missing
    long = [_user("word " * 100_000)]
    return str(raised(ResponseError, lambda: _chat(daemon, long)))


@Scripted
def cancellation(daemon: Daemon) -> str:
    parts = _chat(daemon, [_user(scenario.ENDLESS)], stream=True)
    next(parts)
    return stopped(daemon, parts.close)


@Scripted
def image(daemon: Daemon) -> str:
    """As bytes, which the library sends in base64; in a chat and with a prompt."""
    assert "vision" in _client(daemon).show(daemon.model).capabilities
    shown = {"images": [scenario.picture()]}
    answer = _chat(daemon, [{**_user(scenario.PICTURE_QUESTION), **shown}])
    scenario.saw_the_picture(answer.message.content)
    fields = {"model": daemon.model, "prompt": scenario.PICTURE_QUESTION, "options": _options()}
    return scenario.saw_the_picture(_client(daemon).generate(**fields, **shown).response)


@Scripted
def thinking(daemon: Daemon) -> str:
    message = _chat(daemon, [_user(scenario.GREETING)], think=True).message
    assert message.thinking == scenario.REASONING, message
    return scenario.REASONING


@Scripted
def format_of_an_answer(daemon: Daemon) -> str:
    content = _chat(daemon, [_user(scenario.QUESTION)], format=REPORT).message.content
    assert scenario.SKY in content, content
    return str(content)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _chat(daemon: Daemon, messages: list[Any], **fields: Any) -> Any:
    system = {"role": "system", "content": scenario.SYSTEM}
    return _client(daemon).chat(
        daemon.model, [system, *messages], options=_options(), keep_alive="5m", **fields
    )


def _options() -> dict[str, float]:
    return {"temperature": 0, "num_predict": scenario.MAX_TOKENS}


def _client(daemon: Daemon) -> Any:
    return Client(daemon.root)


if __name__ == "__main__":
    main(globals())
