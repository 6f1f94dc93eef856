"""Messages to token ids: :class:`ChatFormatter`.

Chat templates and end-of-turn tokens are handled here and in :mod:`torchrl_llm.stops`. This module
does not know environments, rewards or tensors: it maps strings to tuples of ids. Sampled ids are
never decoded and tokenized again.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import chain
from typing import Any, Literal, get_args

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerBase

from torchrl_llm import keys, turn_columns
from torchrl_llm.envs.answers import AnswerForm, MissingThinking
from torchrl_llm.envs.columns import NO_EXTRAS, Extras
from torchrl_llm.envs.contexts import Append, AsTemplate, ContextRule, Span, Thought, num_tokens
from torchrl_llm.envs.message_cache import MessageCache
from torchrl_llm.envs.response import Response, split_thinking
from torchrl_llm.envs.template_probe import Contexts, not_append_only, probe_template
from torchrl_llm.envs.template_properties import Frame, TemplateProperties
from torchrl_llm.envs.template_view import TemplateView, follows_template
from torchrl_llm.envs.tool_calls import BadCall, CallForm, ToolCall, as_json, find_call_form
from torchrl_llm.envs.tools import Tool, tool_schemas
from torchrl_llm.rendering import ChatTemplateError, Renderer, Role
from torchrl_llm.stops import control_tokens, token_pattern
from torchrl_llm.utils.options import Checked, ConfigError

logger = logging.getLogger(__name__)

Template = Literal["chat", "raw"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that is append-only, for tokenizers with the tokens ``<|im_start|>`` and
``<|im_end|>``."""

_SOME_TEXT = "a"  # what feedback stands behind, where it matters that it is text
_IN_NO_TOKEN = "\ue000"  # of the private use area: no vocabulary has it in a longer token


class ControlTokenError(ValueError):
    """A message would put a control token into the context, for the tokenizer cannot spell it as
    text."""


def compose_message(observation: str, info: Mapping[str, Any] | None = None) -> str:
    """Join an observation with the ``"prefix"`` and ``"suffix"`` that GEM passes in ``info``, one
    to a line.

    Examples:
        >>> compose_message("Wrong.", {"suffix": "Guess again."})
        'Wrong.\\nGuess again.'
        >>> compose_message("Wrong.\\n", {"prefix": "Turn 2", "suffix": "Guess again."})
        'Turn 2\\nWrong.\\nGuess again.'
    """
    info = info or {}
    parts = [part for part in (info.get("prefix"), observation, info.get("suffix")) if part]
    lines = [part if part.endswith("\n") else part + "\n" for part in parts[:-1]]
    return "".join([*lines, *parts[-1:]])


def read_date(text: str | None) -> date | None:
    """The day that a ``template_date`` names.

    Raises:
        ConfigError: it names none.
    """
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"template_date is {text!r}; expected a day, such as '2026-11-25'.") from error


def _check_unicode(text: str) -> None:
    """Refuse half a character: JSON can spell it, so tools may return it, and fast tokenizers
    cannot encode it."""
    if surrogate := re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"The message holds {surrogate.group()!r} at position {surrogate.start()}: half of a surrogate pair, which is no "
            'Unicode text. Give text that str.encode("utf-8") accepts.'
        )


def _without_added_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], Sequence[int]]:
    """The tokenizer's encoding as if it had no added tokens; its model is shared, not copied."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return partial(tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    # `split_special_tokens` skips special tokens only; control tokens such as <tool_call> are
    # merely added ones.
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    split = backend.pre_tokenizer
    # the text stands behind a control token
    if isinstance(split, Metaspace) and split.prepend_scheme == "first":
        split = Metaspace(replacement=split.replacement, prepend_scheme="never", split=split.split)
    if split is not None:
        plain.pre_tokenizer = split
    return lambda text: plain.encode(text, add_special_tokens=False).ids


def _puts_space_before_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text that is encoded by itself gets a space that the same text behind other text has
    not.

    SentencePiece tokenizers (Llama 2, Mistral 7B) do so.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        alone, behind = (tokenizer.encode(text, add_special_tokens=False) for text in ("5", "\n5"))
        return bool(behind[len(behind) - len(alone) :] != alone)
    text = "5" if backend.normalizer is None else backend.normalizer.normalize_str("5")
    pieces = [] if backend.pre_tokenizer is None else backend.pre_tokenizer.pre_tokenize_str(text)
    return not (pieces[0][0] if pieces else text).startswith("5")


def _with_tools(kwargs: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if tools and "tools" in kwargs:
        raise ConfigError("There are tools, and others in chat_template_kwargs: leave those out.")
    return {**kwargs, "tools": [*tools]} if tools else dict(kwargs)


class ChatFormatter(Checked):
    """Renders a conversation through the tokenizer's own chat template to token ids.

    A context is ``start(first message)``, then for each turn the sampled response ids as they are,
    then ``feedback(response, next message)``. As long as messages hold no look-alikes of control
    tokens and responses end with the end-of-turn token, this equals the template's own rendering of
    the whole conversation. Look-alikes in messages stay text; the system prompt is the caller's own
    and is rendered as part of the template.

    A template that leaves the thinking out of earlier answers, or what it opened for them, shows
    later turns another context than that. Then :attr:`rule` says which spans of the episode a turn
    sees (:class:`~torchrl_llm.envs.AsTemplate`), and contexts equal the template's own rendering
    too. ``contexts="append"`` keeps all that was sampled and seen: contexts are longer, and differ
    from the contexts of a server that renders each turn again; serve the trained model as it was
    trained. A template that does anything else to earlier turns is refused, but for
    ``contexts="append"``.

    Args:
        tokenizer: a transformers tokenizer.
        template: ``"chat"`` (default) renders with the tokenizer's chat template; ``"raw"`` joins
            messages with newlines, for base models without a template (its context starts with the
            BOS token if the tokenizer adds one).
        contexts: how earlier answers look to later turns: as the template shows them
            (``"template"``, default), or as they were (``"append"``).
        system_prompt: text of the system message; ``None`` leaves it to the template.
        chat_template_kwargs: passed on to the template, such as ``{"enable_thinking": False}``.
        missing_thinking: what to do with an answer that nobody sampled (:meth:`answer`) and that
            has no thought, where the template opens one for the assistant: ``"refuse"`` it
            (default), or close the thought before it (``"empty"``).
        template_date: the day, such as ``"2026-11-25"``, that a template which shows today's date
            shows; default: the day on which the formatter is made.
        tools: what the template shows as the tools, see :class:`~torchrl_llm.envs.ToolEnv`; the
            calls in a response are read then (:attr:`Response.calls`). Default: none.

    Attributes:
        properties: what the template does, found out by trying it
            (:mod:`torchrl_llm.envs.template_probe`).
        tools: the JSON schema of each tool.
        rule: which spans of an episode a turn sees.
        columns: of a turn, what is counted of its thinking, if the template knows thinking, and of
            its calls, if there are tools.
        template_date: the day that the template shows; ``None``: it shows none.
        end_of_turn_ids: ids with which the tokenizer ends a response: the template's end-of-turn
            token first (before a user's message, then before tool output, if it is another one),
            then the EOS token.
        stop_ids: the ids at which the policy stops, which are not part of a response's text either.
            They are set by :func:`torchrl_llm.stops.share_stop_ids`; until then, all special
            tokens.

    Raises:
        MissingChatTemplateError: ``template="chat"`` and the tokenizer has none.
        NotAppendOnlyError: the template changes more of what it rendered before than the thinking
            of answers, and ``contexts`` is not ``"append"``; or the text that it puts around a
            message depends on the message or its place.
        ControlTokenError: a message holds a control token that the tokenizer cannot spell as text
            (from :meth:`start` and :meth:`feedback`).
        ValueError: a message is not Unicode text: it holds half of a surrogate pair (likewise).
        ChatTemplateError: the template refuses the conversation, for example its system message.
        ConfigError: there are tools, and the template does not write calls in a form that can be
            read.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> formatter = ChatFormatter(tokenizer)
        >>> tokenizer.decode(formatter.start("Guess."))
        '<|im_start|>user\\nGuess.<|im_end|>\\n<|im_start|>assistant\\n'
        >>> response = tokenizer.encode("5<|im_end|>")
        >>> tokenizer.decode(formatter.feedback(response, "Higher."))
        '\\n<|im_start|>user\\nHigher.<|im_end|>\\n<|im_start|>assistant\\n'
        >>> formatter.decode(response)
        '5'
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: Template = "chat",
        contexts: Contexts = "template",
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        missing_thinking: MissingThinking = "refuse",
        template_date: str | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.contexts = contexts
        self.system_prompt = system_prompt
        self.tools = tool_schemas(tools or ())
        self.chat_template_kwargs = _with_tools(chat_template_kwargs or {}, self.tools)
        self.missing_thinking = missing_thinking
        added = control_tokens(tokenizer)
        self._control = {str(token): token for token in added.values()}
        # The unknown token stands for text without a token of its own; it steers nothing.
        self._control_ids = frozenset(added) - {tokenizer.unk_token_id}
        self._added = token_pattern(self._control)
        self._spaces_text = _puts_space_before_text(tokenizer)
        self._bos: tuple[int, ...] = ()
        today = read_date(template_date) or date.today()
        content: dict[str, Any] = {"system_prompt": system_prompt, "chat_template_kwargs": self.chat_template_kwargs}
        render = None if template == "raw" else Renderer(tokenizer, **content, today=today)
        appends = contexts == "append"
        self.properties = (
            self._raw_properties() if render is None else probe_template(render, self._control, appends=appends)
        )
        self._form = AnswerForm(render, self.properties, missing_thinking)
        self._calls = self._call_form(render) if self.tools else None
        # Where a response begins to the template, and here.
        self._in_thought = self._begins_in_thought = self._form.is_open("")
        self.template_date = today.isoformat() if self.properties.shows_date else None
        # Tokens that a template writes within answers, such as those around thinking.
        own = "".join([*self.properties.thinks, self.properties.header, *(self._calls.tokens if self._calls else ())])
        within = {i for i, t in added.items() if str(t) in own or any(str(t) in pair for pair in self.properties.pairs)}
        self._not_in_answers = frozenset(i for i, token in added.items() if token.special) - within
        self._ends = {role: self._id(frame.end) for role, frame in self.properties.frames.items()}
        self._ends_once = self._id(self.properties.ends_once)
        self._call_end = self._id(self._calls.end) if self._calls else None
        ends = [self._ends_once, *self._ends.values(), self._call_end, tokenizer.eos_token_id]
        self.end_of_turn_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.stop_ids: tuple[int, ...] = tuple(i for i, token in added.items() if token.special)
        self._make_caches()
        self._opening = self._encode_written(self.properties.opens)
        closing = self.properties.thinks[1]
        self._closing_id = self._id(closing) if closing in self._control else None
        self._view: TemplateView | None = None
        self._stripped: str | None = None
        self.rule: ContextRule = Append() if render is None or appends else self._followed(render)
        thinks = self.properties.closes or self.properties.thinking_fields or self._view
        self.columns = (turn_columns.THINKING_COLUMNS if thinks else ()) + (
            turn_columns.TOOL_COLUMNS if self.tools else ()
        )
        if render is not None and appends and self.properties.ends_once:
            raise not_append_only(render, str(self.properties.rewrites))

    def _call_form(self, render: Renderer | None) -> CallForm:
        form = None if render is None else find_call_form(render)
        if form is None:
            raise ConfigError(
                f"The chat template of the tokenizer {self.tokenizer.name_or_path!r} writes no calls of tools, or in no form that can be "
                "read. Leave the tools out, or give the tokenizer a template that writes calls (in a run the setting chat_template)."
            )
        return form

    def _followed(self, render: Renderer) -> ContextRule:
        """The rule by which contexts are what a template shows."""
        reason = self.properties.rewrites
        if reason is None:
            return Append()
        self.rule = AsTemplate()
        # A thought that is a message of its own is never in the content.
        content = [] if self.properties.header else [None]
        for field in (*content, *self.properties.thinking_fields):
            self.properties = replace(self.properties, thinking_field=field)
            self._form = AnswerForm(render, self.properties, self.missing_thinking)
            try:
                self._view = TemplateView(render, self.properties)
            except ChatTemplateError:  # it takes no thought there
                continue
            self._stripped = self._view.stripped
            if follows_template(self, render, self._view):
                logger.info(
                    'Contexts are what the chat template shows (contexts="template"): %s.', reason.partition(":")[0]
                )
                return self.rule
        raise not_append_only(render, reason, keep=True)

    def _make_caches(self) -> None:
        # Members of a group share a first message, and games repeat their feedback.
        self._encode_start = MessageCache(self._render_start)
        self._encode_feedback = MessageCache(self._render_feedback)
        self._encode_written = MessageCache(self._with_added_tokens)
        self._encode_plain = _without_added_tokens(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # Neither caches of bound methods nor local functions can be pickled.
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_encode_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_caches()

    def start(self, message: str) -> tuple[int, ...]:
        """The ids of the first context: system message if any, ``message``, and the opening of the
        assistant's turn."""
        return self._encode_start(message)

    def feedback(
        self, response: Sequence[int], message: str | tuple[str, ...], *, role: Role = "user"
    ) -> tuple[int, ...]:
        """The ids to append after ``response``, so that the assistant can write its next turn.

        Closes the assistant's turn if ``response`` was cut before the template's end-of-turn token,
        or ended with another one. Some templates end an answer with the token that opens the next
        message. Then the response has chosen the role of that message, and ``message`` is rendered
        in it: all of the context is the template's own text.

        Args:
            response: the sampled ids, as they are.
            message: the environment's next message; or the output of several tools, each a message
                of its own if the template has such, else one to a line.
            role: ``"tool"`` for tool output; rendered as ``"user"`` if the template knows no tool
                role.
        """
        return self._feedback(response, message, role)[0]

    def _feedback(
        self, response: Sequence[int], message: str | tuple[str, ...], role: Role
    ) -> tuple[tuple[int, ...], Role]:
        """:meth:`feedback`, and the role in which the message is rendered."""
        if role not in self._ends:
            raise ValueError(f"role is {role!r}; expected one of {get_args(Role)}.")
        last = int(response[-1]) if len(response) else None
        if closed := last is not None and last in self._ends.values():
            role = role if self._ends[role] == last else next(each for each, end in self._ends.items() if end == last)
        closed = closed or (last is not None and last == self._call_end)
        if isinstance(message, tuple):
            if role == "tool" and len(message) > 1 and self.properties.between_tools is not None:
                return self._render_feedback(message, role, closed), role
            message = "\n".join(message)
        return self._encode_feedback(message, role, closed), role

    # ---------------------------------------- spans, of which contexts are made

    def first_spans(self, message: str) -> list[Span]:
        """What :meth:`start` returns, as spans."""
        return self._with_opening(self.start(message), -1, "user")

    def turn_spans(
        self,
        response: Sequence[int],
        message: str | tuple[str, ...],
        turn: int,
        *,
        role: Role = "user",
        said: Response | None = None,
    ) -> list[Span]:
        """A response, and the :meth:`feedback` behind it, as spans.

        Args:
            response: the sampled ids, as they are.
            message: the environment's next message, or the output of several tools.
            turn: of the response.
            role: of the message.
            said: what :meth:`decode` made of the response; ``None``: its thinking is not told from
                its answer.
        """
        thought = 0 if said is None else self._num_thought(response, said)
        kind: Literal["thinking", "empty"] = "thinking" if said is not None and said.thinking else "empty"
        thinking = [Span(response[:thought], turn, kind)] if thought else []
        feedback, role = self._feedback(response, message, role)
        ended = self._ends_once is not None and self._ends_once in response[-1:]
        end = len(response) - 1 if ended else len(response)
        answer = [Span(response[thought:end], turn, "answer")]
        if ended:
            answer.append(Span(response[end:], turn, "end"))
        return [*thinking, *answer, *self._with_opening(feedback, turn, role)]

    def _with_opening(self, ids: tuple[int, ...], turn: int, role: Role) -> list[Span]:
        end = len(ids) - len(self._opening)
        if self._opening and ids[end:] == self._opening:
            return [Span(ids[:end], turn, "message", role), Span(self._opening, turn + 1, "opening")]
        return [Span(ids, turn, "message", role)]

    def columns_of(self, said: Response, spans: Sequence[Span]) -> Extras:
        """What :attr:`columns` have of a response.

        Args:
            said: what :meth:`decode` made of it.
            spans: what :meth:`turn_spans` made of it, with ``said``.
        """
        if not self.columns:
            return NO_EXTRAS
        opening, closing = self.properties.thinks
        length = num_tokens([span for span in spans if span.kind == "thinking"])
        is_open = said.lstrip().startswith(opening) and closing not in said
        found: dict[keys.NestedKey, Any] = {
            turn_columns.THINKING_LENGTH: length,
            turn_columns.THINKING_OPEN: is_open,
            turn_columns.TOOL_CALLS: len(said.calls),
            turn_columns.TOOL_CALLS_JSON: as_json(said.calls),
        }
        kinds = {column.name[-1]: column.kind for column in self.columns}
        return Extras.read({name[-1]: value for name, value in found.items()}, kinds)

    def _num_thought(self, response: Sequence[int], said: Response) -> int:
        """How many ids of a response are its thinking, with the white space behind it that the
        template strips; all but the token that ended the response, if the thought is not closed."""
        in_thought = self._in_thought and said.startswith(self.properties.opens)
        text = said[len(self.properties.opens) :] if in_thought else said
        opening, closing = self.properties.thinks
        before, closing, answer = text.partition(closing)
        if not (in_thought or said.lstrip().startswith(opening)):
            # Behind an empty thought that the prompt has, the same white space is stripped.
            before, closing, answer = "", "", text if self._view and self.properties.opens else ""
        start = len(before + closing) + len(answer) - len(answer.lstrip(self._stripped))
        if not start:
            return 0
        ids = self._without_end(response)
        if self._closing_id is None or self._closing_id not in ids:
            return bisect_right(range(len(ids) + 1), start, key=lambda count: len(self._text(ids[:count]))) - 1
        # Decoding a long thought again and again would take longer than the environment.
        place = [*ids].index(self._closing_id) + 1
        while place < len(ids) and not self._text(ids[place : place + 1]).lstrip(self._stripped):
            place += 1
        return place

    def written_before(self, roles: tuple[Role, ...], thoughts: tuple[Thought, ...]) -> list[tuple[int, ...] | None]:
        """The ids that the template writes before each answer of a conversation, in the place of
        what the prompt opened and of its thought; ``None``: these stand there.

        Args:
            roles: of the messages, one more than there are answers.
            thoughts: of each answer.
        """
        written = [None] * len(thoughts) if self._view is None else self._view(roles, thoughts)
        return [None if text is None else self._encode_written(text) for text in written]

    # ---------------------------------------- responses

    def decode(self, response: Sequence[int]) -> Response:
        """A response as the environment gets it: its text, without the token that ended it and with
        the thought that the prompt opened for it; and the answer behind the thinking beside it.
        """
        return self._said(response, in_thought=self._begins_in_thought)

    def _said(self, response: Sequence[int], *, in_thought: bool) -> Response:
        ids = self._without_end(response)
        text = self._text(ids)
        whole = self.properties.opens + text if in_thought else text
        thinking, text = split_thinking(whole, self.properties.thinks, opened=in_thought)
        calls = () if self._calls is None else self._calls_in(self._calls, ids, in_thought)
        if (label := self.properties.thinking_label) and f"{thinking}\n".startswith(f"{label}\n"):
            thinking = thinking.removeprefix(label).lstrip()
        return Response(whole, text=text.removeprefix(self.properties.header), thinking=thinking, calls=calls)

    def _calls_in(self, form: CallForm, ids: Sequence[int], in_thought: bool) -> tuple[ToolCall | BadCall, ...]:
        """The calls in an answer: those in its thinking are thoughts."""
        whole = form.masked(self.properties.opens if in_thought else "") + form.masked(ids)
        opening, closing = map(form.masked, self.properties.thinks)
        return form.parse_masked(split_thinking(whole, (opening, closing), opened=in_thought)[1], self.tools)

    def _without_end(self, response: Sequence[int]) -> Sequence[int]:
        ended = len(response) and (response[-1] in self.stop_ids or response[-1] in self.end_of_turn_ids)
        return response[:-1] if ended else response

    def _text(self, ids: Sequence[int]) -> str:
        # Cleaning up would remove spaces before punctuation: the environment would get another text
        # than was sampled.
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answer(self, text: str, *, role: Role = "user") -> tuple[int, ...]:
        """The ids of an answer that nobody sampled, such as a scripted player's: the ids of
        ``text``, and the end of the turn.

        They continue a prompt as a sampled response does, in the form in which the template writes
        such a message (:mod:`torchrl_llm.envs.answers`): a thought that the prompt opens is not
        opened again, and where the template trims answers, ``text`` is trimmed. Markup that the
        tokenizer has tokens for, such as ``<think>``, becomes these tokens, as a model would write
        it.

        Args:
            text: the answer.
            role: of the message that follows; some templates end an answer with the token that
                opens it.

        Raises:
            ControlTokenError: the text holds a special token, which would end the turn or change
                the context.
            MissingThinkingError: the template opens a thought, which the text does not close, and
                ``missing_thinking`` does not allow it.
            ValueError: it is not Unicode text: it holds half of a surrogate pair.
        """
        _check_unicode(text)
        end = self._ends[role]
        ids = self.encode_answer(self._form(text) + self.properties.frames[role].closing)
        if not self._not_in_answers.isdisjoint(ids):
            self._check_answer(text)  # they may be the template's own
        return (*ids, *(self.end_of_turn_ids[:1] if end is None else (end,)))

    def _check_answer(self, text: str) -> None:
        if special := [i for i in self.encode_answer(text) if i in self._not_in_answers]:
            raise ControlTokenError(
                f"The answer {text[:80]!r} holds {self.tokenizer.convert_ids_to_tokens(special[0])!r}, a special token of the "
                f"tokenizer {self.tokenizer.name_or_path!r}: leave it out; the end of the turn is added."
            )

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The ids of text that stands where the assistant begins to write, with markup as
        tokens."""
        opening = self.properties.first.after
        last_token = max((match.start() for match in self._added.finditer(opening)), default=0)
        return self._with_added_tokens(text, behind=opening[last_token:])

    def _render_start(self, message: str) -> tuple[int, ...]:
        return (*self._bos, *self._encode(self.properties.first, message))

    def _render_feedback(self, message: str | tuple[str, ...], role: Role, closed: bool) -> tuple[int, ...]:
        messages = (message,) if isinstance(message, str) else message
        ids = tuple(chain.from_iterable(self._encode_messages(self.properties.frames[role], messages)))
        end = self._ends[role]
        # The frame starts by closing the turn; a response that closed it itself needs only the
        # rest.
        ends = self._control_ids if end is None else {end}
        return ids[next(i for i, each in enumerate(ids) if each in ends) + 1 :] if closed else ids

    def _encode_messages(self, frame: Frame, messages: Sequence[str]) -> Iterator[tuple[int, ...]]:
        between = self.properties.between_tools or ""
        tokens = [*self._added.finditer(between)]
        # What stands between two messages is divided behind a token, where nothing merges.
        at = tokens[-1].end() if tokens else len(between)
        opening, closing = [frame.before, between[at:]], [between[:at], frame.after]
        for i, message in enumerate(messages):
            own = frame._replace(before=opening[i > 0], after=closing[i + 1 == len(messages)])
            yield self._encode(own, message, behind=tokens[-1].group() if i and tokens else _SOME_TEXT)

    def _encode(self, frame: Frame, message: str, *, behind: str = "") -> tuple[int, ...]:
        before, after, trims, _ = frame
        _check_unicode(message)
        message = message.strip() if trims else message
        text = before + message + after
        own = self._added.findall(before) + self._added.findall(after)
        if len(self._added.findall(text)) == len(own):
            ids = self._with_added_tokens(text, behind=behind)
            # A tokenizer that normalizes text may find control tokens that are not spelled out in
            # it.
            if self._controls(ids) == self.tokenizer.convert_tokens_to_ids(own):
                return ids
        return self._encode_around(before, message, after, behind)

    def _encode_around(self, before: str, message: str, after: str, behind: str) -> tuple[int, ...]:
        """Encode a message with a look-alike: what stands between the template's own tokens,
        without any added token."""
        opening, closing = [*self._added.finditer(before)], self._added.search(after)
        start, end = opening[-1].end() if opening else 0, closing.start() if closing else len(after)
        text = before[start:] + message + after[:end]
        # As everywhere, a token may take the white space beside it.
        if opening and self._control[opening[-1].group()].rstrip:
            text = text.lstrip()
        if closing and self._control[closing.group()].lstrip:
            text = text.rstrip()
        plain = self._behind(self._encode_plain, "" if opening else behind, text)
        if found := self._controls(plain):
            raise ControlTokenError(
                f"The message {message[:80]!r} holds {self.tokenizer.convert_ids_to_tokens(found[0])!r}, which the tokenizer "
                f"{self.tokenizer.name_or_path!r} has no other tokens for: as part of a context it would be a control token, "
                "not text. Replace it in the environment's text, or use a tokenizer that can spell any text."
            )
        opened = self._with_added_tokens(before[:start], behind=behind)
        return (*opened, *plain, *self._with_added_tokens(after[end:]))

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return list(filter(self._control_ids.__contains__, ids))

    def _with_added_tokens(self, text: str, *, behind: str = "") -> tuple[int, ...]:
        # A template writes its own BOS; the tokenizer would add another to every piece.
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return tuple(self._behind(encode, behind, text)) if text else ()

    def _behind(self, encode: Callable[[str], Sequence[int]], before: str, text: str) -> Sequence[int]:
        """The ids of ``text`` where it stands behind ``before``; if the two merge, behind other
        text, with which nothing does."""
        # Only where it matters: everywhere else text and template are encoded apart, as they always
        # were.
        for other in (before, _IN_NO_TOKEN) if before and self._spaces_text else ():
            start, whole = encode(other), encode(other + text)
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return encode(text)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else int(self.tokenizer.convert_tokens_to_ids(token))

    def _raw_properties(self) -> TemplateProperties:
        bos = self.tokenizer.bos_token_id
        # A tokenizer may name a BOS token and not add it.
        if bos is not None and self.tokenizer.encode("a")[:1] == [bos]:
            self._bos = (bos,)
        first = Frame(f"{self.system_prompt}\n\n" if self.system_prompt else "", "\n")
        return TemplateProperties(first, dict.fromkeys(get_args(Role), Frame("\n", "\n")))
