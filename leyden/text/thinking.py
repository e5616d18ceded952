"""Where a prompt leaves the model's thinking: what templates of this family write as <think> ... </think>."""

from collections.abc import Sequence

from leyden.text.tokenizer import Tokenizer
from leyden.types import Markers, Thinking

OPENS, ENDS, CALLS = "<think>", "</think>", "<tool_call>"
MARKUP = (OPENS, ENDS, CALLS, "</tool_call>")  # added tokens that are part of an answer


def starts_thinking(prompt: Sequence[int], tokenizer: Tokenizer, default: bool = True) -> bool:
    """Whether an answer to this prompt starts inside thinking: does `<think>` stand after the last `</think>`?

    `default` is for a prompt without either.
    """
    opens, closes = tokenizer.id_of(OPENS), tokenizer.id_of(ENDS)
    return next((id == opens for id in reversed(prompt) if id in (opens, closes)), default)


def thinking_after(
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    *,
    starts: bool,
    calls: bool = False,
    reopens: bool = True,
    grace: bool = False,
    forced: str = ENDS,
) -> Thinking:
    """What the engine has to know of the thinking in an answer to `prompt`.

    starts   the answer starts inside thinking
    calls    a tool call ends thinking too
    reopens  thinking that has ended may begin again
    grace    line ends are needed
    forced   text that ends thinking at its budget; what stands behind `</think>` in it is left out, and if it has no
             `</think>`, one follows

    The line end that the template itself puts after `<think>` is not counted as thinking.
    """
    opens, closes = tokenizer.id_of(OPENS), tokenizer.id_of(ENDS)
    spent = next((n for n, id in enumerate(reversed(prompt)) if id == opens), 0) if starts else 0
    if spent and not tokenizer.bytes_of(prompt[-spent]).strip(b"\n"):
        spent -= 1
    ids = tokenizer.encode(forced.partition(ENDS)[0])
    markers = Markers(
        opens=opens if reopens else None,
        ends=(closes, tokenizer.id_of(CALLS)) if calls else (closes,),
        forced=(*ids, closes),
        line_ends=tokenizer.line_ends if grace else (),
    )
    return Thinking(markers=markers, open=starts, spent=spent)
