"""Find the answers of a chat, and the rows of text in which each has its own context.

Every answer that the target could have written after its context has loss, and nothing else has; the context is what a
server would send. Two renders of the chat define an answer: the messages before it with the generation prompt, and the
same messages with the answer. A template may write an answer differently once other messages follow: it drops thinking,
or ends the chat with another token. Then the next answer begins a row of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from data.documents import Document, NothingToLearnError, RowError
from data.rows import has_loss
from speculator.chat import DATA_DAY, Message, RefusedError, any_added, chat_text, text_after_answer, thoughts_of

# Two renders that differ in empty marks of thinking alone count as equal: <think>\n\n</think>, [THINK][/THINK], ...
_EMPTY_MARKS = re.compile(r"([<\[]\|?)([\w:]*think[\w:]*)(\|?[>\]])\s*\1/\2\3\n*")
_MARK_OF_THINKING = r"[<\[]\|?/?[\w:]*think[\w:]*\|?[>\]]"
_TRAILING_MARKS = re.compile(rf"(?:{_MARK_OF_THINKING})(?:{_MARK_OF_THINKING}|\s)*\Z")
# Stands for an answer's content in a render: where it appears, the template writes answers.
_PROBE = "MARKofANSWER"
_NO_THOUGHTS = "the chat template leaves out the answer's thoughts"
# Characters after a difference that a message quotes.
_EXCERPT = 30
_LONGEST_TOKEN = 100


@dataclass
class TextRow:
    """A training row of a chat, before it is tokenized.

    Attributes:
        text: the rendered messages.
        spans: start and end in `text` of each answer with loss, the token that ends it included.
        why: for log lines, why the chat needs this further row; empty for its first row.
    """

    text: str
    spans: list[tuple[int, int]]
    why: str = ""


@dataclass
class ChatRows:
    """The training rows of a chat, and what became of its answers.

    Attributes:
        left_out: (number of the message, from 0; reason) of each answer that can't have loss.
        marked: number of answers without loss because the data say so, as by "weight": 0.
        thoughtless: number of answers with loss whose thinking is dropped, by a chat template that writes none.
    """

    rows: list[TextRow] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)
    marked: int = 0
    thoughtless: int = 0


@dataclass(frozen=True)
class _AnswerFormat:
    """What a template writes around answers.

    Attributes:
        header: text that the template writes before an answer's content, if it has no generation prompt; else "".
        tail: text after an answer that ends the chat, of which the first `end` characters are the answer's end token.
        next_turn: matches the token that begins the next turn, if no other token ends an answer; else None.
        added: matches the text of any added token.
        between: matches added tokens, marks of thinking and spaces.
        closing: matches special tokens and spaces at the end of a text.
    """

    header: str
    tail: str
    end: int
    next_turn: re.Pattern | None
    added: re.Pattern
    between: re.Pattern
    closing: re.Pattern


@lru_cache(maxsize=32)
def _answer_format(tokenizer: PreTrainedTokenizerBase, template: str, with_tools: bool) -> _AnswerFormat:
    """Return what a template writes around answers, found by rendering a known chat; `with_tools`: it has a tool."""
    added = any_added(tokenizer)
    special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    tail, between = text_after_answer(tokenizer, template, with_tools)
    end = added.search(tail)
    header = ""
    chat: list[Message] = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _PROBE}]
    try:
        plain, asked = (chat_text(tokenizer, chat[:1], ask=ask, today=DATA_DAY) for ask in (False, True))
        if plain == asked:  # no generation prompt: what stands before the answer's content is no answer
            written = chat_text(tokenizer, chat, today=DATA_DAY).partition(_PROBE)[0]
            header = _TRAILING_MARKS.sub("", written.removeprefix(asked)).rstrip(" ")
    except RefusedError:  # a template with needs of its own: the renders of the chat itself decide
        pass
    return _AnswerFormat(
        header=header if header.strip() else "",
        tail=tail,
        end=end.end() if end else len(tail),
        next_turn=re.compile(rf"\s*(?:{added.pattern})") if end is None and added.match(between.lstrip()) else None,
        added=added,
        between=re.compile(rf"(?:{added.pattern}|{_MARK_OF_THINKING}|\s)*"),
        closing=re.compile(rf"(?:{'|'.join(special) or '(?!)'}|\s)*\Z"),
    )


def chat_rows(document: Document, tokenizer: PreTrainedTokenizerBase) -> ChatRows:
    """Render a chat as training rows: one, and a further one where an answer's context does not continue the last row.

    Args:
        document: "messages", "where" (file and line, for errors), and maybe "tools" and "dropped", the number of
            messages that were cut off before the first.

    Raises:
        RowError: the template rejects the chat, or none of its answers can have loss.
        NothingToLearnError: all answers are marked as not to be trained on.
    """
    if not tokenizer.chat_template:
        raise RowError(document["where"], f"a chat, but the tokenizer {tokenizer.name_or_path} has no chat template")
    chat = _Chat(document, tokenizer)
    found, dropped = ChatRows(), document.get("dropped", 0)
    for number, message in enumerate(document["messages"]):
        if message["role"] != "assistant":
            continue
        if not has_loss(message):
            found.marked += 1
            continue
        try:
            text, start, end = chat.answer(number)
        except RefusedError as error:
            found.left_out.append((number + dropped, str(error)))
            continue
        reason = _fault(message, text, start, end)
        if reason == _NO_THOUGHTS and not chat.thinks:
            # The target writes no thoughts in its chats: what the answer says is what it could have written.
            found.thoughtless += 1
            reason = ""
        if reason:
            found.left_out.append((number + dropped, reason))
        elif not (found.rows and chat.extend(found.rows[-1], text, (start, end))):
            why = _difference(found.rows[-1], text[:start], number + dropped) if found.rows else ""
            found.rows.append(TextRow(text, [(start, end)], why))
    if not found.rows:
        if found.marked and not found.left_out:
            raise NothingToLearnError(document["where"], "chats whose answers are all marked as not to be learnt")
        if not found.left_out:
            raise RowError(document["where"], "a chat without an answer")
        first, reason = found.left_out[0]
        raise RowError(document["where"], f"message {first + 1}: {reason}", reason)
    # Rows overlap: a later row repeats the messages of an earlier one, so an earlier one ends with its last answer.
    # What follows the last answer of all stays in its row if the whole chat continues it.
    for row in found.rows[:-1]:
        row.text = row.text[: row.spans[-1][1]]
    last = found.rows[-1]
    if not chat.extend(last, chat.whole()):
        last.text = last.text[: last.spans[-1][1]]
    return found


class _Chat:
    """Renders a chat and finds its answers in the text. The last render is kept, since it is often asked for again."""

    def __init__(self, document: Document, tokenizer: PreTrainedTokenizerBase):
        self._messages, self._tools, self._tokenizer = document["messages"], document.get("tools"), tokenizer
        try:
            template = tokenizer.get_chat_template(None, self._tools)
            self._format = _answer_format(tokenizer, template, bool(self._tools))
            self.thinks = re.search("think|reason", template, re.IGNORECASE) is not None
        except ValueError as error:  # several templates, none of which is the default
            raise RowError(document["where"], str(error)) from None
        self._rendered: tuple[int, str] = (0, "")

    def _render(self, messages: list[Message], ask: bool = False) -> str:
        return chat_text(self._tokenizer, messages, self._tools, ask, DATA_DAY)

    def _written(self, count: int) -> str:
        """Return the text of the first `count` messages; RefusedError: the template rejects them."""
        if self._rendered[0] != count:
            self._rendered = count, self._render(self._messages[:count])
        return self._rendered[1]

    def whole(self) -> str | None:
        """Return the text of all messages, or None if the template rejects them."""
        try:
            return self._written(len(self._messages))
        except RefusedError:
            return None

    def answer(self, number: int) -> tuple[str, int, int]:
        """Return the text of the messages up to answer `number` (a message, from 0), and the answer's start and end.

        Raises a RefusedError if the template rejects these messages, or writes the answer where we can't find it.
        """
        before, form = self._render(self._messages[:number], ask=True), self._format
        text = self._written(number + 1)
        start = len(before)
        if text.startswith(before):
            start += len(form.header) if text.startswith(form.header, start) else 0
        else:
            # The generation prompt has something else than the written turn, as an opened <think>: the turn rules. It
            # begins where it departs from the prompt if only tokens of the template follow there, in the prompt and
            # before another answer's content; else where it departs from the other answer.
            other = self._render([*self._messages[:number], {"role": "assistant", "content": _PROBE}])
            header = other.partition(_PROBE)[0]
            place = self._agreement(header, text)
            asked = min(place, self._agreement(before, text))
            if all(form.between.fullmatch(each, asked) for each in (before, header)):
                place = asked
            elif not form.between.fullmatch(header, place):
                raise RefusedError("the chat template writes the answer where it can't be found")
            start = len(_TRAILING_MARKS.sub("", text[:place]))
        return text, start, self._end(text, start)

    def _agreement(self, a: str, b: str) -> int:
        """Return the length of the common prefix of two texts, cut back so that it ends inside no added token."""
        place = _common(a, b)
        for text in (a, b):
            for found in self._format.added.finditer(text, max(0, place - _LONGEST_TOKEN)):
                if found.start() >= place:
                    break
                if found.end() > place:
                    place = found.start()
        return place

    def _end(self, text: str, start: int) -> int:
        """Return where the answer from `start` on ends: after its end token, before a chat's close (EOS in Phi 3)."""
        form = self._format
        if form.tail and text.endswith(form.tail):
            end = len(text) - len(form.tail) + form.end
            token = form.tail[: form.end].strip()
            if not token:  # plain text ends the answer
                return end
            ends = (found.end() for found in re.finditer(re.escape(token), text[:end]) if found.start() >= start)
            return next((each for each in ends if form.between.fullmatch(text, each, end)), end)
        # The turn ends in its own way, as tool calls do in some templates: after the first of its closing tokens. What
        # follows every answer is not a part of it.
        # The longest common end of the two texts.
        size = _common(text[::-1], form.tail[::-1])
        shared = form.added.search(text, len(text) - size)
        last = shared.start() if shared and size else len(text)
        closing = form.closing.search(text[:last], start)
        found = form.added.search(text, closing.start(), last) if closing else None
        return found.end() if found else last

    def extend(self, row: TextRow, text: str | None, span: tuple[int, int] | None = None) -> bool:
        """Replace a row's text by a longer render of the chat, if the render continues the row; return whether it does.

        `text` is None if the template rejects the chat. `span` is an answer's start and end in it, to add to the row.
        """
        end = row.spans[-1][1]
        if text is None:
            return False
        # The next answer's context must continue the row: a template that drops old thinking rewrites it, and the
        # answer gets a row of its own.
        context = text[: span[0]] if span else text
        if context.startswith(row.text[:end]):
            spans = row.spans
        else:
            old, new = _without_marks(row.text[:end]), _without_marks(context)
            if not new.text.startswith(old.text):
                return False
            # The answers' places in the new render: equal without the marks, so by the number of characters before
            # them.
            spans = [(new.place(old.length(a)), new.place(old.length(b), before=True)) for a, b in row.spans]
        # The model stops at the token that begins the next turn.
        if self._format.next_turn and (closing := self._format.next_turn.match(text, spans[-1][1])):
            spans = [*spans[:-1], (spans[-1][0], closing.end())]
        row.text, row.spans = text, [*spans, *([span] if span else [])]
        return True


@dataclass(frozen=True)
class _Unmarked:
    """A text without empty marks of thinking, such as "<think></think>".

    Attributes:
        text: what is left.
        gaps: (place in `text`, number of characters) of each mark that was removed, in order.
    """

    text: str
    gaps: list[tuple[int, int]]

    def length(self, place: int) -> int:
        """Return how many characters of `text` come before a place in the original."""
        for at, size in self.gaps:
            if place <= at:
                break
            # A place inside a gap counts as the gap's beginning.
            place -= min(size, place - at)
        return place

    def place(self, length: int, before: bool = False) -> int:
        """Return the place in the original after `length` characters of `text`: after a mark there, or `before` it."""
        return length + sum(size for at, size in self.gaps if at < length or (at == length and not before))


def _without_marks(text: str) -> _Unmarked:
    """Return a text without its empty marks of thinking, and where they were."""
    gaps, left_out = [], 0
    for found in _EMPTY_MARKS.finditer(text):
        # Places count the characters that are left: with marks of 10 at 5 and 20 they are 5 and 10.
        gaps.append((found.start() - left_out, len(found[0])))
        left_out += len(found[0])
    return _Unmarked(_EMPTY_MARKS.sub("", text) if gaps else text, gaps)


def _fault(message: Message, text: str, start: int, end: int) -> str:
    """Return why the answer `text[start:end]` can have no loss; empty if it can.

    It needs a line of the message's content, a line of its thoughts, and the name of each tool call. Without the name,
    as in a template that knows no tools, the head would learn to end where the target calls.
    """
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    lines, thoughts = _lines(content), _lines(thoughts_of(message))
    named = [name for call in calls if (name := (call.get("function") or call).get("name"))]
    turn = text[start:end]
    if not (lines or calls):
        return "the answer is empty"
    if (lines and not any(line in turn for line in lines)) or not all(name in turn for name in named):
        return "the chat template leaves out the answer's content or its tool calls"
    if thoughts and not any(line in turn for line in thoughts):
        return _NO_THOUGHTS
    return "" if start else "nothing stands before the answer"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in re.split(rf"\n|{_MARK_OF_THINKING}", text) if line.strip()]


def _common(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    # The predicate "the first i + 1 characters differ" is false and then true: its first true i is the answer. Whole
    # slices compare in C, so this takes a logarithm of comparisons.
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[: i + 1] != b[: i + 1])


def _difference(row: TextRow, context: str, number: int) -> str:
    """Describe for a log line where the `context` of message `number` (from 0) differs from the row before it."""
    before = row.text[: row.spans[-1][1]]
    place = _common(before, context)
    was, now = (text[max(0, place - 10) : place + _EXCERPT] for text in (before, context))
    return f"before message {number + 1} the template writes {now!r} in place of {was!r}"
