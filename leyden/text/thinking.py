"""Where a prompt leaves the model's thinking: what templates of this family write as <think> ... </think>."""

from collections.abc import Sequence
from dataclasses import replace

from leyden.text.tokenizer import Tokenizer
from leyden.types import Markers, SamplingParams, Thinking

OPENS, ENDS, CALLS = "<think>", "</think>", "<tool_call>"
MARKUP = (OPENS, ENDS, CALLS, "</tool_call>")  # added tokens that are part of an answer


def starts_thinking(prompt: Sequence[int], tokenizer: Tokenizer, default: bool = True) -> bool:
    """Whether an answer to this prompt starts inside thinking: does `<think>` stand after the last `</think>`?

    `default` is for a prompt without either.
    """
    opens, closes = tokenizer.id_of(OPENS), tokenizer.id_of(ENDS)
    return next((id == opens for id in reversed(prompt) if id in (opens, closes)), default)


def with_thinking(
    params: SamplingParams,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    starts: bool,
    calls: bool = False,
    forced: str = ENDS,
) -> SamplingParams:
    """`params` with what the engine has to know of the thinking in an answer to `prompt`, if grammar or budget need it.

    starts  the answer starts inside thinking
    calls   a tool call ends thinking too
    forced  text that ends thinking at its budget; what stands behind `</think>` in it is left out, and if it has no
            `</think>`, one follows

    The line end that templates put after `<think>` is not counted as thinking.
    """
    if params.grammar is None and params.thinking_token_budget is None:
        return params
    opens, closes = tokenizer.id_of(OPENS), tokenizer.id_of(ENDS)
    spent = next((n for n, id in enumerate(reversed(prompt)) if id == opens), 0) if starts else 0
    if spent and not tokenizer.bytes_of(prompt[-spent]).strip(b"\n"):
        spent -= 1
    markers = Markers(
        opens=opens if params.grammar is None else None,  # a grammar says what follows thinking
        ends=(closes, tokenizer.id_of(CALLS)) if calls else (closes,),
        forced=(*tokenizer.encode(forced.partition(ENDS)[0]), closes),
        line_ends=tokenizer.line_ends if params.thinking_token_grace else (),
    )
    return replace(params, thinking=Thinking(markers=markers, open=starts, spent=spent))
