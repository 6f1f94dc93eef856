"""Messages to token ids, append-only: :class:`ChatFormatter`.

Here lives everything that knows chat templates and end-of-turn tokens. It does not know environments, rewards or
tensors: it maps strings to tuples of ids. The ids of a conversation only ever grow, and what the policy sampled is
never decoded and tokenised again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

Role = Literal["user", "tool"]
Template = Literal["chat", "raw"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template that is append-only, for tokenizers with the tokens ``<|im_start|>`` and ``<|im_end|>``."""

_PROBE_TURNS = 4
_CACHED_MESSAGES = 4096


class ChatTemplateError(ValueError):
    """The tokenizer's chat template cannot be used."""


class MissingChatTemplateError(ChatTemplateError):
    """The tokenizer has no chat template."""


class NotAppendOnlyError(ChatTemplateError):
    """The chat template rewrites messages that were already rendered."""


class Frame(NamedTuple):
    """The template's own text around one message.

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


def _is_control(token: AddedToken) -> bool:
    """Whether an added token steers the model: a special one, or one in the form of markup, such as ``<tool_call>``.

    Other added tokens are vocabulary: whitespace runs, words and phrases.
    """
    return token.special or re.fullmatch(r"[<\[].*[>\]]", str(token).strip(), re.DOTALL) is not None


class ChatFormatter:
    """Renders a conversation through the tokenizer's own chat template, append-only, to token ids.

    A context is ``start(first message)``, then for each turn the sampled response ids as they are, then
    ``feedback(response, next message)``. As long as messages hold no look-alikes of control tokens and responses end
    with the end-of-turn token, this equals the template's own rendering of the whole conversation. Look-alikes in
    messages stay text; the system prompt is the caller's own and is rendered as part of the template.

    Args:
        tokenizer: a transformers tokenizer.
        template: ``"chat"`` (default) renders with the tokenizer's chat template; ``"raw"`` joins messages with newlines,
            for base models without a template (its context starts with the BOS token if the tokenizer adds one).
        system_prompt: text of the system message; ``None`` leaves it to the template.
        chat_template_kwargs: passed on to the template, such as ``{"enable_thinking": False}``.

    Attributes:
        end_of_turn_ids: ids that end a response: the template's end-of-turn token first, then the tokenizer's EOS token.

    Raises:
        MissingChatTemplateError: ``template="chat"`` and the tokenizer has none.
        NotAppendOnlyError: the template changes what it rendered before when a message is added.
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
        system_prompt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if template not in get_args(Template):
            raise ValueError(f"template is {template!r}; expected one of {get_args(Template)}.")
        self.tokenizer = tokenizer
        self.template = template
        self.system_prompt = system_prompt
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        added = sorted(
            filter(_is_control, tokenizer.added_tokens_decoder.values()), key=lambda t: len(str(t)), reverse=True
        )
        literals = [re.escape(str(token)) for token in added]
        self._added = re.compile("|".join(literals) or r"(?!)")
        self._frames, self._first, self._bos, turn_end = (
            self._raw_frames() if template == "raw" else self._chat_frames()
        )
        self._turn_end: int | None = turn_end
        ends = [turn_end, tokenizer.eos_token_id]
        self.end_of_turn_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in ends if end is not None))
        self._encode_start = lru_cache(_CACHED_MESSAGES)(self._render_start)
        self._encode_feedback = lru_cache(_CACHED_MESSAGES)(self._render_feedback)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_encode_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._encode_start = lru_cache(_CACHED_MESSAGES)(self._render_start)
        self._encode_feedback = lru_cache(_CACHED_MESSAGES)(self._render_feedback)

    def start(self, message: str) -> tuple[int, ...]:
        """The ids of the first context: system message if any, ``message``, and the opening of the assistant's turn."""
        return self._encode_start(message)

    def feedback(self, response: Sequence[int], message: str, *, role: Role = "user") -> tuple[int, ...]:
        """The ids to append after ``response``, so that the assistant can write its next turn.

        Closes the assistant's turn if ``response`` was cut before the template's end-of-turn token.

        Args:
            response: the sampled ids, as they are.
            message: what the environment says next.
            role: ``"tool"`` for tool output; rendered as ``"user"`` if the template knows no tool role.
        """
        if role not in get_args(Role):
            raise ValueError(f"role is {role!r}; expected one of {get_args(Role)}.")
        closed = bool(len(response)) and response[-1] == self._turn_end
        return self._encode_feedback(message, role, closed)

    def decode(self, response: Sequence[int]) -> str:
        """The text of a response for the environment: without its end-of-turn token, with everything else."""
        if len(response) and response[-1] in self.end_of_turn_ids:
            response = response[:-1]
        return str(self.tokenizer.decode(response, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _render_start(self, message: str) -> tuple[int, ...]:
        return (*self._bos, *self._encode(self._first, message))

    def _render_feedback(self, message: str, role: Role, closed: bool) -> tuple[int, ...]:
        ids = self._encode(self._frames[role], message)
        # The frame starts by closing the turn; a response that closed it itself needs only the rest.
        return ids[ids.index(self._turn_end) + 1 :] if closed and self._turn_end is not None else ids

    def _encode(self, frame: Frame, message: str) -> tuple[int, ...]:
        before, after, trims = frame
        message = message.strip() if trims else message
        text = before + message + after
        own = len(self._added.findall(before)) + len(self._added.findall(after))
        if len(self._added.findall(text)) == own:
            return self._with_added_tokens(text)
        # A look-alike: the stretch between the template's own tokens is encoded without any added token.
        cut_before = max((match.end() for match in self._added.finditer(before)), default=0)
        cut_after = next((match.start() for match in self._added.finditer(after)), len(after))
        plain = self._without_added_tokens(before[cut_before:] + message + after[:cut_after])
        return (*self._with_added_tokens(before[:cut_before]), *plain, *self._with_added_tokens(after[cut_after:]))

    def _with_added_tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _without_added_tokens(self, text: str) -> tuple[int, ...]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        # `split_special_tokens` skips special tokens only; control tokens such as <tool_call> are merely added ones.
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [text]
        if backend.pre_tokenizer is not None:
            pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return tuple(token.id for piece in pieces for token in backend.model.tokenize(piece))

    def _raw_frames(self) -> tuple[dict[Role, Frame], Frame, tuple[int, ...], int | None]:
        bos = self.tokenizer.bos_token_id
        adds_bos = bos is not None and self.tokenizer.encode("a")[:1] == [bos]
        first = Frame(f"{self.system_prompt}\n\n" if self.system_prompt else "", "\n")
        frame = Frame("\n", "\n")
        return {"user": frame, "tool": frame}, first, (bos,) if adds_bos else (), None

    def _chat_frames(self) -> tuple[dict[Role, Frame], Frame, tuple[int, ...], int | None]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise MissingChatTemplateError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template. Set tokenizer.chat_template (for "
                'example to torchrl_llm.envs.CHATML), or pass template="raw" for a base model.'
            )
        first, user = self._probe("user")
        try:
            tool = self._probe("tool")[1]
        except ChatTemplateError:
            tool = user
        return {"user": user, "tool": tool}, first, (), self._find_turn_end(user)

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
        for thinking in ("", "<think>\nhm\n</think>\n\n"):
            # Quotes, brackets and a line break: a template that escapes or rewrites contents shows here.
            said = [f'{{q{i}: "<&>\\\n{i}"}}' for i in range(_PROBE_TURNS)]
            answers = [f"{thinking}a{i}\n{i}." for i in range(_PROBE_TURNS - 1)]
            messages: list[dict[str, str]] = []
            renderings = []
            for i in range(_PROBE_TURNS):
                messages.append({"role": roles[i], "content": f" \n{said[i]}\n "})
                renderings.append(self._render(messages))
                if i < len(answers):
                    messages.append({"role": "assistant", "content": answers[i]})
            first, later = self._frames_of(renderings, said, answers)
        return first, later[0]

    def _frames_of(self, renderings: list[str], said: list[str], answers: list[str]) -> tuple[Frame, list[Frame]]:
        for shorter, longer, answer in zip(renderings, renderings[1:], answers, strict=False):
            before = shorter + answer
            if not longer.startswith(before):
                at = next((i for i, (a, b) in enumerate(zip(before, longer, strict=False)) if a != b), len(longer))
                raise self._not_append_only(
                    f"once a message is added, it renders {longer[at : at + 50]!r} where {before[at : at + 50]!r} stood before"
                )
        frames, rest = [], renderings[-1]
        for i, content in enumerate(said):
            before, found, rest = rest.partition(content)
            after, _, rest = rest.partition(answers[i]) if i < len(answers) else (rest, "", "")
            padded = before.endswith(" \n"), after.startswith("\n ")
            if not found or padded[0] != padded[1]:
                raise self._not_append_only(f"it does not render the message {content!r} as it is")
            frames.append(Frame(before[:-2], after[2:]) if padded[0] else Frame(before, after, trims=True))
        # The closing user message of a tool probe has a frame of its own.
        later = frames[1:-1]
        if len(set(later)) > 1:
            raise self._not_append_only(
                f"it renders {later[0].before!r} before one message, {later[-1].before!r} before another"
            )
        return frames[0], later

    def _not_append_only(self, reason: str) -> NotAppendOnlyError:
        return NotAppendOnlyError(
            f"The chat template of the tokenizer {self.tokenizer.name_or_path!r} is not append-only: {reason}. Templates that "
            "drop thinking or rewrite history cannot hold sampled ids. Give the tokenizer a template that keeps every message "
            '(tokenizer.chat_template, for example torchrl_llm.envs.CHATML), or pass template="raw".'
        )

    def _find_turn_end(self, user: Frame) -> int | None:
        """The id with which the template closes an assistant message; ``None`` if it uses no added token for it."""
        answer = "a0\n0."
        text = self._render([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}], prompt=False)
        match = self._added.search(text.rpartition(answer)[2])
        if match is None:
            return None
        turn_end = int(self.tokenizer.convert_tokens_to_ids(match.group()))
        if turn_end not in self._with_added_tokens(user.before):
            raise self._not_append_only(f"it writes {match.group()!r} after the last assistant message only")
        return turn_end
