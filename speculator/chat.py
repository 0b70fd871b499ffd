"""Chats: clean the messages that users and servers send, render them with the tokenizer's template, and parse answers.

Templates run in the Jinja sandbox of transformers.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from transformers import PreTrainedTokenizerBase

from speculator.errors import UserError, check_text, first_line
from speculator.files import Json

if TYPE_CHECKING:
    from typing_extensions import Required

DATA_DAY = datetime(2024, 7, 26)
"""Date that templates write into training data, prompts and evaluation suites, so that a resumed run renders the same
text. Llama 3's templates use it if they have no clock."""


THOUGHTS: tuple[Literal["reasoning_content", "thinking", "reasoning"], ...] = (
    "reasoning_content",
    "thinking",
    "reasoning",
)
"""Names that templates, datasets and servers have for the text of an answer's thoughts."""


Tool = dict[str, Json]
"""A tool in OpenAI's format, which only templates read."""


class Function(TypedDict, total=False):
    """The function that a call names, and its arguments: an object, or JSON text."""

    name: str
    arguments: Json


class ToolCall(Function, total=False):
    """A call of a tool in OpenAI's format; some datasets leave out the object `function` around its keys."""

    id: str
    type: str
    function: Function


class Message(TypedDict, total=False):
    """A message of a chat in OpenAI's format; a template may read other keys too.

    A message with `weight` 0 is not trained on.
    """

    role: Required[str]
    content: str | None
    reasoning_content: str
    thinking: str
    reasoning: str
    tool_calls: list[ToolCall]
    tool_call_id: str
    name: str
    weight: float


_MEDIA = {"image", "images", "audio", "audios", "video", "videos"}


def media_of(row: dict[str, Json]) -> str:
    """Return the key of a row's images, sounds or videos, without which its texts say little; "" if it has none."""
    return next((key for key, value in row.items() if key in _MEDIA and value), "")


def with_history(history: Json, messages: list[Any]) -> list[Any]:
    """Return messages with a row's "history", pairs of a question and its answer, after their system message."""
    pairs: Any = history or []
    if not isinstance(pairs, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise UserError('"history" is not a list of pairs')
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in pairs]
    system = int(bool(messages) and isinstance(messages[0], dict) and messages[0].get("role") == "system")
    return [*messages[:system], *chain.from_iterable(turns), *messages[system:]]


def with_system(messages: Json, system: Json) -> Json:
    """Return a row's messages with its "system" message first, unless it has none or the messages have one."""
    if not system or not isinstance(messages, list):
        return messages
    own = any(isinstance(each, dict) and each.get("role") == "system" for each in messages)
    return messages if own else [{"role": "system", "content": system}, *messages]


def thoughts_of(message: Message) -> str:
    """Return the text of an answer's thoughts (its reasoning) under any of their names; "" without thoughts."""
    return next((found for name in THOUGHTS if (found := message.get(name))), "")


class RefusedError(UserError):
    """Raised if a chat template rejects messages, or leaves out a message or the tools."""


def chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[Tool] | None = None,
    ask: bool = False,
    today: datetime | None = None,
    variables: dict[str, Json] | None = None,
) -> str:
    """Return the text of a chat in the tokenizer's template.

    Args:
        tokenizer: the target's tokenizer, which has a chat template.
        messages, tools: in OpenAI's format, as `clean_messages` and `clean_tools` return them.
        ask: end with the start of the assistant's next turn.
        today: date for the template; None: now.
        variables: variables of the template, such as `enable_thinking`.

    Raises:
        RefusedError: the template raises an error, or leaves out a message or the tools.
    """
    try:
        template = tokenizer.get_chat_template(None, tools)
        if today is not None and "strftime_now" in template:
            template = _stopped_clock(today) + template
        # Templates disagree on the form of tool calls, so they are rewritten to the one that this template takes.
        if any("tool_calls" in message for message in messages):
            form = _form_of_calls(tokenizer, template, bool(tools)) or (False, False)
            messages = [_in_form(message, *form) if "tool_calls" in message else message for message in messages]
        messages = [_with_known_names(message, template) for message in messages]
        text = _render(tokenizer, template, messages, tools, ask, variables)
        check_text("the rendered chat", text)
        if tools and not _writes_tools(tokenizer, template):
            without = None
            with suppress(Exception):  # a template that needs tools
                without = _render(tokenizer, template, messages, None, ask, variables)
            if without == text:  # else it writes them in this chat, if not in the probe
                raise RefusedError("the chat template leaves out the tools")
        if doubtful := _not_found(text, messages):
            # The template may also write contents in a way of its own: does it write others in their places?
            marked = list(messages)
            for number in doubtful:
                marked[number] = {**messages[number], "content": f"{_MARK}{number}."}
            written = set(re.findall(rf"{_MARK}(\d+)\.", _render(tokenizer, template, marked, tools, ask, variables)))
            left_out = [messages[number]["role"] for number in doubtful if str(number) not in written]
            if left_out:
                raise RefusedError(f"the chat template leaves out messages of the role {left_out[0]!r:.40}")
        return text
    except RefusedError:
        raise
    except Exception as error:  # a template may raise anything
        raise RefusedError(f"the chat template rejects the messages: {first_line(error)}") from None


def _not_found(text: str, messages: list[Message]) -> list[int]:
    """Return the numbers of messages, of users and assistants apart, whose contents are not known to be in the text.

    Takes time in proportion to the text: after the first that is not found, the others are not looked for.
    """
    others = [number for number, message in enumerate(messages) if message["role"] not in ("user", "assistant")]
    place = 0  # of the last content that was found: most templates write messages in their order
    for index, number in enumerate(others):
        content = (messages[number].get("content") or "").strip()
        forms = {
            content,
            json.dumps(content, ensure_ascii=False)[1:-1],
        }  # as it is, and as the filter `tojson` writes it
        found = _find(text, forms, place)
        place = _find(text, forms, 0) if found < 0 else found
        if place < 0:
            return others[index:]
    return []


def _find(text: str, forms: set[str], start: int) -> int:
    """Return the first place at or after `start` where the text has one of the forms; -1: it has none."""
    # In windows that double: a form that is nowhere is not looked for far beyond the place of another.
    longest, reach = max(map(len, forms)), 1024
    while True:
        places = [text.find(form, start, start + longest + reach) for form in forms]
        places = [place for place in places if place >= 0]
        if places or start + longest + reach >= len(text):
            return min(places, default=-1)
        reach *= 2


def _render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: list[Message],
    tools: list[Tool] | None,
    ask: bool,
    variables: dict[str, Json] | None = None,
) -> str:
    """Return the text that `template` makes of a chat, without checks; it may raise any exception."""
    how: Any = {
        **(variables or {}),
        "conversation": messages,
        "tools": tools,
        "chat_template": template,
        "tokenize": False,
        "add_generation_prompt": ask,
    }
    text = tokenizer.apply_chat_template(**how)
    assert isinstance(text, str)
    return text


def _with_known_names(message: Message, template: str) -> Message:
    """Return a copy of a message with a role and with names of its thoughts that the template knows.

    OpenAI's newer role `developer` is the system of most templates. Thoughts get each of their names, as in
    transformers from 5.21 on.
    """
    if thought := thoughts_of(message):
        message = {**message, "reasoning_content": thought, "thinking": thought, "reasoning": thought}
    if message["role"] == "developer" and "developer" not in template:
        message = {**message, "role": "system"}
    return message


# Cleaning


def clean_messages(messages: Any) -> list[Message]:
    """Return the messages of a chat, given as a list or as JSON text, in the form that templates expect.

    Nulls and `tool_calls: []` are removed, JSON text becomes an object, and content in parts becomes one text.

    Raises:
        UserError: they are not objects with text as "role" and "content", or thoughts or tool calls are malformed. A
            message with tool calls, and the result of a tool, need no content.
    """
    messages = from_json(messages)
    if not isinstance(messages, list) or not messages:
        raise UserError("a chat without messages" if messages == [] else '"messages" is not a list of objects')
    return [_clean_message(from_json(given), f"message {number}") for number, given in enumerate(messages, start=1)]


def _clean_message(given: Any, name: str) -> Message:
    """Clean one message, see `clean_messages`; `name`, such as "message 1", is for errors."""
    if not isinstance(given, dict):
        raise UserError('"messages" is not a list of objects')
    # Templates check which keys exist, but in a table every message has every key.
    message: Any = {key: value for key, value in given.items() if value is not None}
    if "content" in message:
        message["content"] = _content_text(message["content"], name)
    if calls := from_json(message.pop("tool_calls", None)):
        message["tool_calls"] = _clean_calls(calls, name)
    elif message.get("role") in ("assistant", "tool"):
        message.setdefault("content", "")
    for key in ("role", "content", *THOUGHTS):
        needed = key == "role" or key in message or (key == "content" and not calls)
        if needed and not isinstance(message.get(key), str):
            raise UserError(f'the "{key}" of {name} is not a text')
    return message


def _clean_calls(calls: Any, name: str) -> list[ToolCall]:
    """Return the tool calls of the message `name` with JSON text parsed; raise a UserError for malformed ones."""
    if not isinstance(calls, list):
        raise UserError(f'the "tool_calls" of {name} is not a list of objects')
    calls = [_call(call) for call in calls]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_call(function):
            raise UserError(f'a tool call of {name} has no text as "name", or no object or text as "arguments"')
        function["arguments"] = arguments_of(function)
    return calls


def arguments_of(function: Any) -> Json:
    """Return the arguments of a call, an object or text; an empty object if they are missing, blank or null."""
    arguments = function.get("arguments")
    empty = not arguments or (isinstance(arguments, str) and arguments.strip() in ("", "null"))
    return {} if empty else arguments


def clean_tools(tools: Any) -> list[Tool] | None:
    """Return tools (objects or JSON text) as a list; None if there are none; raise a UserError for anything else."""
    tools = from_json(tools)
    if not tools:
        return None
    cleaned = [_call(tool) for tool in tools] if isinstance(tools, list) else []
    if not cleaned or not all(isinstance(tool, dict) for tool in cleaned):
        raise UserError('"tools" is not a list of objects')
    return cleaned


def _call(call: Any) -> Any:
    """Return a copy of a tool call or a tool, itself and its `function` parsed if they are JSON text."""
    call = from_json(call)
    if not isinstance(call, dict):
        return call
    function = from_json(call.get("function"))
    return call | (
        {"function": dict(function) if isinstance(function, dict) else function} if "function" in call else {}
    )


def from_json(value: Any) -> Any:
    """Parse text that holds a JSON object or list, as `Json` columns of `datasets` do; return other values as given."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") else value
    return value


_TEXT_OF_PART = ("text", "value", "content")
"""Names that datasets have for the text of a part of a message's content."""


def _content_text(content: Any, name: str) -> Any:
    """Return the text of content that is a list of parts in OpenAI's format, joined by line ends, as vLLM does.

    Other content is returned as given. Raises a UserError, which names the message, for a part that is not text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise UserError(f"{name} has a part of type {kind!r:.40} in its content; only text is supported")
        text = next((part[key] for key in _TEXT_OF_PART if part.get(key) is not None), None)
        if not isinstance(text, str):
            raise UserError(f"{name} has a part of type 'text' without a text as \"text\"")
        texts.append(text)
    return "\n".join(texts)


_MARK = "MARKofMESSAGE"
_PROBE: Json = {"key": "PROBEvalue"}
_PROBE_TOOL, _OTHER_TOOL = (
    Tool(
        type="function",
        function={"name": name, "description": "", "parameters": {"type": "object", "properties": {}}},
    )
    for name in ("PROBEname", "OTHERname")
)


@lru_cache(maxsize=32)
def _writes_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    with suppress(Exception):  # a template may raise anything
        chat: list[Message] = [{"role": "user", "content": "PROBE"}]
        return "PROBEname" in _render(tokenizer, template, chat, [_PROBE_TOOL], True)
    return False


@lru_cache(maxsize=32)
def _form_of_calls(tokenizer: PreTrainedTokenizerBase, template: str, with_tools: bool) -> tuple[bool, bool] | None:
    """Find how a template takes tool calls; return whether arguments must be JSON text, and missing content None.

    False, False: arguments must be an object, and missing content "". None: it writes no calls.

    Most templates want an object and write it as JSON, some append text. Some write calls only if there is no content
    (null in transformers 5.17, a missing key in 5.23).
    """
    call: ToolCall = {"id": "abcdefgh1", "type": "function", "function": {"name": "PROBEname", "arguments": _PROBE}}
    message: Message = {"role": "assistant", "tool_calls": [call]}
    best, found = 0, None
    forms = ((False, False), (True, False), (False, True), (True, True))
    tools = [_OTHER_TOOL] if with_tools else None  # which some templates need
    for form in forms:
        with suppress(Exception):
            text = _render(
                tokenizer, template, [{"role": "user", "content": "PROBE"}, _in_form(message, *form)], tools, False
            )
            # JSON is best. An object in Python's notation, and text that is quoted again, are not what a model writes.
            as_json = re.search(r'(?<!\\)"PROBEvalue"', text) is not None
            as_text = "PROBEvalue" in text and not re.search(r"""['\\]["']?PROBEvalue""", text)
            # 1: with something of the call; 2: with its name; 3 or more: with the arguments, best of all as JSON.
            written = "PROBEname" in text or "PROBEvalue" in text
            score = written + ("PROBEname" in text) * (1 + as_text + 2 * as_json)
            if score > best:
                best, found = score, form
    return found


def writes_calls(tokenizer: PreTrainedTokenizerBase, tools: list[Tool] | None) -> bool:
    """Return whether the chat template for these tools writes the tool calls of earlier answers."""
    return _form_of_calls(tokenizer, tokenizer.get_chat_template(None, tools), bool(tools)) is not None


def _in_form(message: Message, as_text: bool, null: bool) -> Message:
    """Return a copy of a message with tool calls in the form (`as_text`, `null`) that `_form_of_calls` returned."""
    calls = message["tool_calls"]
    calls = [_with_arguments(call, as_text) for call in calls] if isinstance(calls, list) else calls
    return {**message, "content": message.get("content") or (None if null else ""), "tool_calls": calls}


def _with_arguments(call: Any, as_text: bool) -> Any:
    """Return a call with its arguments as JSON text, or as an object; a call in another form is returned as given."""
    with suppress(KeyError, TypeError):
        arguments = from_json(call["function"]["arguments"])
        if isinstance(arguments, dict):  # text that is no JSON object stays as it is
            written = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
            return {**call, "function": {**call["function"], "arguments": written}}
    return call


@cache
def _stopped_clock(today: datetime) -> str:
    """Return a Jinja macro `strftime_now` that writes the date `today`, because transformers accepts no other clock."""
    directives = "aAbBcCdDeFfgGhHIjklmMpPrRsSTuUVwWxXyYzZ"
    # Every directive that a template's format may hold is replaced by its text: "%d %b %Y" becomes "26 Jul 2024".
    written = [(f"%{letter}", today.strftime(f"%{letter}")) for letter in directives]
    written += [(f"%-{name[1]}", text.lstrip("0") or "0") for name, text in written]  # glibc: no leading zeros
    replaced = "".join(f" | replace('{name}', '{text}')" for name, text in written)
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"


# Answers

_USER, _ANSWER = "MARKofUSER", "MARKofANSWER"
_NO_VARIABLES = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"} | {
    "messages"
}


@lru_cache(maxsize=32)
def text_after_answer(tokenizer: PreTrainedTokenizerBase, template: str, with_tools: bool = False) -> tuple[str, str]:
    """Return the text that a template writes after a chat's last answer, and that between an answer and a user turn.

    Args:
        with_tools: derive it from a chat with a tool, which some templates need.

    Both are empty for a template that rejects such chats, or does not write the turns as they are.
    """
    # The same answer twice: at the end of a chat, and before another user turn.
    chat: list[Message] = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
    try:
        tools = [_PROBE_TOOL] if with_tools else None
        last, earlier = (_render(tokenizer, template, each, tools, False) for each in (chat, [*chat, *chat[:1]]))
    except Exception:  # a template may raise anything
        return "", ""
    found = re.search(f"{_ANSWER}(.*?){_USER}", earlier, re.DOTALL)
    return last.rpartition(_ANSWER)[2] if _ANSWER in last else "", found[1] if found else ""


def any_added(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """Return a pattern that matches any added token, the longest first; without such tokens it matches nothing."""
    texts = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def end_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the token that ends an answer by the chat template; None without a template or such a token.

    It is the first added token after an answer. A template that ends answers with nothing leaves it to the token that
    begins the next turn (GLM).
    """
    if not tokenizer.chat_template:
        return None
    return _end_token(tokenizer, tokenizer.get_chat_template(None, None), len(tokenizer))


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether answers may begin with thoughts: the chat template knows them, and does not close them itself."""
    if not tokenizer.chat_template or not re.search("think|reasoning", str(tokenizer.chat_template), re.IGNORECASE):
        return False
    try:
        asked = chat_text(tokenizer, [{"role": "user", "content": "a question"}], ask=True, today=DATA_DAY)
    except RefusedError:  # a template with needs of its own
        return True
    return not asked.rstrip().endswith(THINK_END)  # as Qwen 3's with `enable_thinking` false


@lru_cache(maxsize=32)
def _end_token(tokenizer: PreTrainedTokenizerBase, template: str, size: int) -> int | None:
    """`end_token`, cached by template and number of tokens (`size`)."""
    last, between = text_after_answer(tokenizer, template)
    added = any_added(tokenizer)
    found = added.search(last) or added.match(between.lstrip())
    return tokenizer.get_vocab()[found[0]] if found else None


_CHANNEL_MARK = re.compile(r"<\|(start|channel|message|end|return|call)\|>")
THINK_END = "</think>"
"""The mark after the thoughts of an answer."""
_MOST_CALLS = 256  # of one answer; further ones stay text
_CALL, _CALL_END = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\s*</tool_call>")


def answer_message(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int], tools: list[Tool] | None = None
) -> Message:
    """Parse an answer into the message that a chat template takes as history: content, reasoning and tool calls.

    Args:
        answer: token ids of the answer, which may be cut off.
        tools: those of the chat, whose schemas give the arguments of calls their types.

    The tokenizer's response template rules (transformers 5.23 and later). Without one we know gpt-oss's channels,
    `</think>`, and `<tool_call>` with a JSON object in it.
    """
    if getattr(tokenizer, "response_template", None):
        with suppress(Exception):  # an answer that was cut off, or whose call is malformed, need not follow the format
            parsed = tokenizer.parse_response(list(answer), prefix=list(prompt), tools=list(tools or ()) or None)
            if all(_is_call(call["function"]) for call in parsed.get("tool_calls") or ()):
                for call in parsed.get("tool_calls") or ():
                    call["function"]["arguments"] = arguments_of(call["function"])
                return {"role": "assistant", "content": "", **parsed}
    template = str(tokenizer.chat_template)
    message: Message = {"role": "assistant"}
    if parts := channels(tokenizer, answer):
        text = "".join(part for name, to, part in parts if name != "analysis" and not to)
        thought = "".join(part for name, _, part in parts if name == "analysis")
        calls = [(to.removeprefix("functions."), part) for _, to, part in parts if to.startswith("functions.")]
        found: list[Function] = [{"name": name, "arguments": part.strip()} for name, part in calls if name]
    else:
        # The end token need not be marked as special.
        ended = len(answer) and answer[-1] in (tokenizer.eos_token_id, end_token(tokenizer))
        text, thought, found = decoded(tokenizer, answer[:-1] if ended else answer, special=False), "", []
        if "reasoning_content" in template:
            thought, text = split_thought(text)
        if "tool_calls" in template:
            with suppress(KeyError, TypeError):
                called, rest = _calls_in(text)
                if called and all(map(_is_call, called)):
                    found = [{"name": call["name"], "arguments": call.get("arguments")} for call in called]
                    text = rest.rstrip()
    message["content"] = text
    if thought:
        message["thinking" if "message.thinking" in template else "reasoning_content"] = thought
    if found:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": arguments_of(call)}} for call in found
        ]
    return message


def _calls_in(text: str) -> tuple[list[Any], str]:
    """Return the JSON objects between `<tool_call>` and `</tool_call>`, and the text without them."""
    # The JSON decoder finds the end of a call: a regular expression would search the rest of the text for it, once for
    # each call that has none. The decoder counts lines up to an error, so the number of calls has a limit too.
    calls, kept, place = [], [], 0
    for begin in islice(_CALL.finditer(text), _MOST_CALLS):
        if begin.start() < place:  # in the arguments of the last call
            continue
        with suppress(ValueError, RecursionError):
            call, stop = json.JSONDecoder().raw_decode(text, begin.end())
            if end := _CALL_END.match(text, stop):
                calls.append(call)
                kept.append(text[place : begin.start()])
                place = end.end()
    return calls, "".join([*kept, text[place:]])


def _is_call(function: Any) -> bool:
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments") or "", str | dict)


def has_channels(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether answers have the channels of gpt-oss, between special tokens."""
    return "<|channel|>" in str(tokenizer.chat_template)


def channels(tokenizer: PreTrainedTokenizerBase, answer: Sequence[int]) -> list[tuple[str, str, str]]:
    """Return (name, recipient of a call or "", text) of each channel of an answer, whose last one may be cut off."""
    if not has_channels(tokenizer):
        return []
    # A call is "to=functions.f<|channel|>commentary json<|message|>{...}<|call|>", or has "to=.." after "commentary".
    # Split at the marks, "commentary.." is one piece before the mark of the message, and "to=.." three.
    pieces, found = _CHANNEL_MARK.split(decoded(tokenizer, answer, special=True)), []
    for i in range(3, len(pieces), 2):
        name = re.match(r"\w+", pieces[i - 1])
        if pieces[i] == "message" and pieces[i - 2] == "channel" and name:
            before = pieces[i - 3].split()[-1:]
            to = re.search(r"to=([^\s<]+)", before[0] if before and "to=" in before[0] else pieces[i - 1])
            found.append((name[0], to[1] if to else "", pieces[i + 1]))
    return found


def split_thought(text: str) -> tuple[str, str]:
    """Return an answer's text before `THINK_END`, and that after it; without this mark "" and the whole text."""
    before, mark, after = text.partition(THINK_END)
    return (before.replace("<think>", "").strip("\n"), after.lstrip("\n")) if mark else ("", text)


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], special: bool) -> str:
    """Return the text of token ids without any clean-up of spaces; `special` keeps special tokens."""
    # Clean-up would remove spaces that a stream has printed already.
    text = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def check_template_variables(variables: dict[str, Json]) -> None:
    """Raise a UserError for a name that can't be a variable, or that transformers or this library sets itself."""
    wrong = [name for name in variables if not name.isidentifier() or name in _NO_VARIABLES]
    if wrong:
        raise UserError(f"chat_template_kwargs: {wrong[0]!r:.40} is not the name of a variable")


def set_template_variables(tokenizer: PreTrainedTokenizerBase | None, variables: dict[str, Json] | None) -> None:
    """Change a tokenizer's chat template so that these variables have default values in every chat; None: no change.

    They are vLLM's `chat_template_kwargs`, such as `enable_thinking`. Raises a UserError without a chat template, or
    for a name that can't be a variable.
    """
    if not variables:
        return
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError("chat_template_kwargs: the target has no chat template")
    check_template_variables(variables)
    # a request may set the variable too, and then its value counts
    # The line end is for `trim_blocks`, which would otherwise remove one with which the template begins.
    first = "".join(
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in variables.items()
    )
    first += "\n"
    template = tokenizer.chat_template
    several = isinstance(template, dict)
    tokenizer.chat_template = {name: first + each for name, each in template.items()} if several else first + template


def chat_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a rendered chat, without adding BOS, which the template writes itself."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
