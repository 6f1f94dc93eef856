"""Messages to token ids, append-only: :class:`ChatFormatter`.

Chat templates and end-of-turn tokens are handled here and in :mod:`torchrl_llm.stops`. This module does not know environments,
rewards or tensors: it maps strings to tuples of ids. The ids of a conversation only grow, and sampled ids are never decoded
and tokenized again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerBase

from torchrl_llm.options import Checked
from torchrl_llm.stops import closing_token, control_tokens, token_pattern

Role = Literal["user", "tool"]
Template = Literal["chat", "raw"]
History = Literal["refuse", "append"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that is append-only, for tokenizers with the tokens ``<|im_start|>`` and ``<|im_end|>``."""

_PROBE_TURNS = 4  # the fewest with two messages between the first and the last, which must be rendered alike
_CACHED_MESSAGES = 4096  # members of a group share a first message, and games repeat their feedback


class ChatTemplateError(ValueError):
    """The tokenizer's chat template cannot be used."""


class MissingChatTemplateError(ChatTemplateError):
    """The tokenizer has no chat template."""


class NotAppendOnlyError(ChatTemplateError):
    """The chat template rewrites messages that were already rendered."""


class ControlTokenError(ValueError):
    """A message would put a control token into the context, for the tokenizer cannot spell it as text."""


class Frame(NamedTuple):
    """The template's text around one message.

    Attributes:
        before: from the end of the last message's content to the start of this one's.
        after: from the end of this message's content to where the assistant starts to write.
        trims: whether the template strips the whitespace around the content.
    """

    before: str
    after: str
    trims: bool = False


def compose_message(observation: str, info: Mapping[str, Any] | None = None) -> str:
    """Join an observation with the ``"prefix"`` and ``"suffix"`` that GEM passes in ``info``, one to a line.

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


def _check_unicode(text: str) -> None:
    """Refuse half a character: JSON can spell it, so tools may return it, and fast tokenizers cannot encode it."""
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
    # `split_special_tokens` skips special tokens only; control tokens such as <tool_call> are merely added ones.
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    split = backend.pre_tokenizer
    if isinstance(split, Metaspace) and split.prepend_scheme == "first":  # the text stands behind a control token
        split = Metaspace(replacement=split.replacement, prepend_scheme="never", split=split.split)
    if split is not None:
        plain.pre_tokenizer = split
    return lambda text: plain.encode(text, add_special_tokens=False).ids


class ChatFormatter(Checked):
    """Renders a conversation through the tokenizer's own chat template, append-only, to token ids.

    A context is ``start(first message)``, then for each turn the sampled response ids as they are, then
    ``feedback(response, next message)``. As long as messages hold no look-alikes of control tokens and responses end
    with the end-of-turn token, this equals the template's own rendering of the whole conversation. Look-alikes in
    messages stay text; the system prompt is the caller's own and is rendered as part of the template.

    A template that rewrites history (drops earlier thinking, leaves out old turns) cannot be reproduced: the policy would be
    trained on tokens that it did not see, or would see tokens that it did not sample. It is refused, unless
    ``history="append"`` asks to keep everything that was sampled and seen. Then contexts hold what the template would have
    removed. They are longer, and they differ from those of a server that renders each turn again; serve the trained model as
    it was trained.

    Args:
        tokenizer: a transformers tokenizer.
        template: ``"chat"`` (default) renders with the tokenizer's chat template; ``"raw"`` joins messages with newlines,
            for base models without a template (its context starts with the BOS token if the tokenizer adds one).
        history: what to do with a template that rewrites history: ``"refuse"`` (default) or ``"append"``.
        system_prompt: text of the system message; ``None`` leaves it to the template.
        chat_template_kwargs: passed on to the template, such as ``{"enable_thinking": False}``.

    Attributes:
        end_of_turn_ids: ids with which the tokenizer ends a response: the template's end-of-turn token first, then the EOS
            token.
        stop_ids: the ids at which the policy stops, which are no part of a response's text either. They are set by
            :func:`torchrl_llm.stops.share_stop_ids`; until then, all special tokens.

    Raises:
        MissingChatTemplateError: ``template="chat"`` and the tokenizer has none.
        NotAppendOnlyError: the template changes what it rendered before when a message is added, and ``history="refuse"``;
            or the text that it puts around a message depends on the message or its place.
        ControlTokenError: a message holds a control token that the tokenizer cannot spell as text (from :meth:`start` and
            :meth:`feedback`).
        ValueError: a message is no Unicode text: it holds half of a surrogate pair (likewise).
        ChatTemplateError: the template refuses the conversation, for example its system message.

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
        history: History = "refuse",
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.history = history
        self.system_prompt = system_prompt
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        added = control_tokens(tokenizer)
        self._control = {str(token): token for token in added.values()}
        # The unknown token stands for text without a token of its own; it steers nothing.
        self._control_ids = frozenset(added) - {tokenizer.unk_token_id}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added = token_pattern(self._control)
        self._bos: tuple[int, ...] = ()
        self._turn_end: int | None = None
        self._first, self._frames = self._raw_frames() if template == "raw" else self._chat_frames()
        ends = [self._turn_end, tokenizer.eos_token_id]
        self.end_of_turn_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))
        self.stop_ids: tuple[int, ...] = tuple(i for i, token in added.items() if token.special)
        self._make_caches()

    def _make_caches(self) -> None:
        self._encode_start = lru_cache(_CACHED_MESSAGES)(self._render_start)
        self._encode_feedback = lru_cache(_CACHED_MESSAGES)(self._render_feedback)
        self._encode_plain = _without_added_tokens(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # Neither caches of bound methods nor local functions can be pickled.
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_encode_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_caches()

    def start(self, message: str) -> tuple[int, ...]:
        """The ids of the first context: system message if any, ``message``, and the opening of the assistant's turn."""
        return self._encode_start(message)

    def feedback(self, response: Sequence[int], message: str, *, role: Role = "user") -> tuple[int, ...]:
        """The ids to append after ``response``, so that the assistant can write its next turn.

        Closes the assistant's turn if ``response`` was cut before the template's end-of-turn token.

        Args:
            response: the sampled ids, as they are.
            message: the environment's next message.
            role: ``"tool"`` for tool output; rendered as ``"user"`` if the template knows no tool role.
        """
        if role not in get_args(Role):
            raise ValueError(f"role is {role!r}; expected one of {get_args(Role)}.")
        closed = bool(len(response)) and response[-1] == self._turn_end
        return self._encode_feedback(message, role, closed)

    def decode(self, response: Sequence[int]) -> str:
        """The text of a response for the environment: without the token that ended it, with everything else."""
        if len(response) and (response[-1] in self.stop_ids or response[-1] in self.end_of_turn_ids):
            response = response[:-1]
        # Cleaning up would remove spaces before punctuation: the environment would get another text than was sampled.
        return str(self.tokenizer.decode(response, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answer(self, text: str) -> tuple[int, ...]:
        """The ids of an answer that nobody sampled, such as a scripted player's: those of ``text``, and the end of the turn.

        Markup that the tokenizer has tokens for, such as ``<think>``, becomes these tokens, as a model would write it.

        Raises:
            ControlTokenError: the text holds a special token, which would end the turn or change the context.
            ValueError: it is no Unicode text: it holds half of a surrogate pair.
        """
        _check_unicode(text)
        ids = self._with_added_tokens(text)
        special = [i for i in ids if i in self._special_ids]
        if special:
            raise ControlTokenError(
                f"The answer {text[:80]!r} holds {self.tokenizer.convert_ids_to_tokens(special[0])!r}, a special token of the "
                f"tokenizer {self.tokenizer.name_or_path!r}: leave it out; the end of the turn is added."
            )
        return (*ids, *self.end_of_turn_ids[:1])

    def _render_start(self, message: str) -> tuple[int, ...]:
        return (*self._bos, *self._encode(self._first, message))

    def _render_feedback(self, message: str, role: Role, closed: bool) -> tuple[int, ...]:
        ids = self._encode(self._frames[role], message)
        # The frame starts by closing the turn; a response that closed it itself needs only the rest.
        return ids[ids.index(self._turn_end) + 1 :] if closed and self._turn_end is not None else ids

    def _encode(self, frame: Frame, message: str) -> tuple[int, ...]:
        before, after, trims = frame
        _check_unicode(message)
        message = message.strip() if trims else message
        text = before + message + after
        own = self._added.findall(before) + self._added.findall(after)
        if len(self._added.findall(text)) == len(own):
            ids = self._with_added_tokens(text)
            # A tokenizer that normalizes text may find control tokens that are not spelled out in it.
            if self._controls(ids) == self.tokenizer.convert_tokens_to_ids(own):
                return ids
        return self._encode_around(before, message, after)

    def _encode_around(self, before: str, message: str, after: str) -> tuple[int, ...]:
        """Encode a message with a look-alike: what stands between the template's own tokens, without any added token."""
        opening, closing = [*self._added.finditer(before)], self._added.search(after)
        start, end = opening[-1].end() if opening else 0, closing.start() if closing else len(after)
        text = before[start:] + message + after[:end]
        # As everywhere, a token may take the white space beside it.
        if opening and self._control[opening[-1].group()].rstrip:
            text = text.lstrip()
        if closing and self._control[closing.group()].lstrip:
            text = text.rstrip()
        plain = self._encode_plain(text)
        if found := self._controls(plain):
            raise ControlTokenError(
                f"The message {message[:80]!r} holds {self.tokenizer.convert_ids_to_tokens(found[0])!r}, which the tokenizer "
                f"{self.tokenizer.name_or_path!r} has no other tokens for: as part of a context it would be a control token, "
                "not text. Replace it in the environment's text, or use a tokenizer that can spell any text."
            )
        return (*self._with_added_tokens(before[:start]), *plain, *self._with_added_tokens(after[end:]))

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return list(filter(self._control_ids.__contains__, ids))

    def _with_added_tokens(self, text: str) -> tuple[int, ...]:
        # A template writes its own BOS; the tokenizer would add another to every piece.
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _raw_frames(self) -> tuple[Frame, dict[Role, Frame]]:
        bos = self.tokenizer.bos_token_id
        # A tokenizer may name a BOS token and not add it.
        if bos is not None and self.tokenizer.encode("a")[:1] == [bos]:
            self._bos = (bos,)
        first = Frame(f"{self.system_prompt}\n\n" if self.system_prompt else "", "\n")
        return first, dict.fromkeys(get_args(Role), Frame("\n", "\n"))

    def _chat_frames(self) -> tuple[Frame, dict[Role, Frame]]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise MissingChatTemplateError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template. Set tokenizer.chat_template (for "
                'example to torchrl_llm.envs.CHATML), or pass template="raw" for a base model.'
            )
        first, user = self._probe("user")
        try:
            tool = self._probe("tool")[1]
        except ChatTemplateError:
            # A tool role that is refused, or not append-only, is none that can be used.
            tool = user
        self._turn_end = self._find_turn_end(user)
        return first, {"user": user, "tool": tool}

    def _render(self, messages: list[dict[str, str]], *, prompt: bool = True) -> str:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        try:
            text = self.tokenizer.apply_chat_template(
                system + messages, tokenize=False, add_generation_prompt=prompt, **self.chat_template_kwargs
            )
        except TemplateError as error:
            roles = [message["role"] for message in system + messages]
            raise ChatTemplateError(
                f"The chat template refuses a conversation with the roles {roles}: {error}. If it knows no system role, "
                "put the system prompt into the environment's first message; otherwise give the tokenizer another template."
            ) from error
        return str(text)

    def _probe(self, role: Role) -> tuple[Frame, Frame]:
        """The frames of the first and of later messages, checked on conversations of up to four turns."""
        roles = ["user", *[role] * (_PROBE_TURNS - 2), "user"]
        # Quotes, brackets and a line break: a template that escapes or rewrites contents shows here.
        questions = [f'{{q{i}: "<&>\\\n{i}"}}' for i in range(_PROBE_TURNS)]
        answers = [f"a{i}\n{i}." for i in range(_PROBE_TURNS - 1)]
        if self.history == "refuse":
            # Also with thinking, which Qwen3's template drops from earlier answers.
            for thinking in ("", "<think>\nhm\n</think>\n\n"):
                thought = [thinking + answer for answer in answers]
                self._check_append_only(self._render_turns(roles, questions, thought), thought)
        return self._frames_of(self._render_turns(roles, questions, answers), questions, answers)

    def _render_turns(self, roles: Sequence[str], questions: list[str], answers: list[str]) -> list[str]:
        """The prompt of each turn."""
        # White space on both sides shows whether the template trims contents.
        asked = [{"role": role, "content": f" \n{text}\n "} for role, text in zip(roles, questions, strict=True)]
        answered = [{"role": "assistant", "content": answer} for answer in answers]
        messages = [message for pair in zip(asked, [*answered, {}], strict=True) for message in pair]
        return [self._render(messages[: 2 * turn + 1]) for turn in range(len(asked))]

    def _check_append_only(self, renderings: list[str], answers: list[str]) -> None:
        for shorter, longer, answer in zip(renderings, renderings[1:], answers, strict=False):
            before = shorter + answer
            if not longer.startswith(before):
                at = next((i for i, (a, b) in enumerate(zip(before, longer, strict=False)) if a != b), len(longer))
                raise self._not_append_only(
                    f"once a message is added, it renders {longer[at : at + 50]!r} where {before[at : at + 50]!r} stood before"
                )

    def _frames_of(self, renderings: list[str], questions: list[str], answers: list[str]) -> tuple[Frame, Frame]:
        frames = []
        for rendering, question, answer in zip(renderings, questions, ["", *answers], strict=True):
            before, found, after = rendering.rpartition(question)
            _, answered, before = before.rpartition(answer) if answer else ("", "-", before)
            padded = before.endswith(" \n"), after.startswith("\n ")
            if not answered:
                raise self._not_append_only(f"it leaves out the answer before the message {question!r}")
            if not found or padded[0] != padded[1]:
                raise self._not_append_only(f"it does not render the message {question!r} as it is")
            frames.append(Frame(before[:-2], after[2:]) if padded[0] else Frame(before, after, trims=True))
        # The closing user message of a tool probe has a frame of its own.
        later = frames[1:-1]
        if len(set(later)) > 1:
            raise self._not_append_only(
                f"it renders {later[0].before!r} before one message, {later[-1].before!r} before another"
            )
        return frames[0], later[0]

    def _not_append_only(self, reason: str) -> NotAppendOnlyError:
        keep = 'keep what was sampled all the same (history="append"), ' if self.history == "refuse" else ""
        return NotAppendOnlyError(
            f"The chat template of the tokenizer {self.tokenizer.name_or_path!r} is not append-only: {reason}. Templates that "
            f"drop thinking or rewrite history cannot hold sampled ids. Either {keep}give the tokenizer a template that keeps "
            'every message (tokenizer.chat_template, for example torchrl_llm.envs.CHATML), or pass template="raw".'
        )

    def _find_turn_end(self, user: Frame) -> int | None:
        """The id with which the template closes an assistant message; ``None`` if it uses no added token for it."""
        answer = "a0\n0."
        text = self._render([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}], prompt=False)
        token = closing_token(self._control, text, answer)
        if token is None:
            return None
        turn_end = int(self.tokenizer.convert_tokens_to_ids(token))
        if turn_end not in self._with_added_tokens(user.before):
            raise self._not_append_only(f"it writes {token!r} after the last assistant message only")
        return turn_end
