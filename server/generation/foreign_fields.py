"""Fields of other servers that are refused: each would change the answer. A value that changes
nothing passes, because clients send all of their settings.
"""

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from server.errors import UNSUPPORTED
from server.json_model import RequestModel, refused

Unsupported = SkipJsonSchema[Annotated[Any, refused()]]


def neutral(*values: object) -> AfterValidator:
    """Refuses a field that is not supported: only these values pass, which change nothing."""

    def check(value: Any) -> Any:
        if value not in values:
            message = "not supported; only {values} passes, which changes nothing"
            shown = {"values": " or ".join(map(repr, values))}
            raise PydanticCustomError(UNSUPPORTED, message, shown)
        return value

    return AfterValidator(check)


Off = SkipJsonSchema[Annotated[Any, neutral(0, -1, "", (), [], {})]]
"""Off by 0, false or nothing, and by -1."""
One = SkipJsonSchema[Annotated[Any, neutral(1, 0)]]
"""Off by 1, and by 0, which some clients send for what they do not use."""
Always = SkipJsonSchema[Annotated[Any, neutral(True)]]
Never = SkipJsonSchema[Annotated[Any, neutral(False)]]


class ForeignSamplers(RequestModel):
    """Samplers of llama.cpp, Ollama, text-generation-webui, koboldcpp and their kind."""

    mirostat: Off = None
    mirostat_mode: Off = None
    samplers: Off = None
    sampler_order: Off = None
    sampler_priority: Off = None
    temperature_last: Never = None
    dynatemp_range: Off = None
    dynamic_temperature: Never = None
    smoothing_factor: Off = None
    typical_p: One = None
    typical: One = None
    tfs_z: One = None
    tfs: One = None
    top_a: Off = None
    top_n_sigma: Off = None
    nsigma: Off = None
    skew: Off = None
    adaptive_target: Off = None
    min_keep: Off = None
    epsilon_cutoff: Off = None
    eta_cutoff: Off = None
    penalty_alpha: Off = None
    guidance_scale: One = None
    negative_prompt: Off = None
    encoder_repetition_penalty: One = None
    no_repeat_ngram_size: Off = None
    num_beams: One = None
    do_sample: Always = None
    ban_eos_token: Never = None
    banned_strings: Off = None
    custom_token_bans: Off = None
    repeat_last_n: SkipJsonSchema[int | None] = None
    """Checked where the penalties are known: with one, it can only be -1."""


class ForeignFields(RequestModel):
    """What else vLLM, SGLang and llama.cpp have that changes an answer."""

    use_beam_search: Unsupported = None
    logits_processors: Unsupported = None
    custom_logit_processor: Unsupported = None
    custom_params: Unsupported = None
    vllm_xargs: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    structural_tag: Unsupported = None
    grammar_lazy: Unsupported = None
    grammar_triggers: Unsupported = None
    truncate_prompt_tokens: Unsupported = None
    prompt_embeds: Unsupported = None
    watermarking: Unsupported = None
    stop_regex: Unsupported = None
    no_stop_trim: Unsupported = None
    include_stop_str_in_output: Unsupported = None
    skip_special_tokens: Always = None
    include_reasoning: Always = None
    separate_reasoning: Always = None
    reasoning_format: SkipJsonSchema[Annotated[Any, neutral("auto", "deepseek")]] = None
    parse_tool_calls: Always = None
    lora: Unsupported = None
    lora_path: Unsupported = None
    image_data: Unsupported = None
    n_indent: Off = None
    t_max_predict_ms: Off = None
