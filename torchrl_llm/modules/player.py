"""Players that are functions: :class:`PlayerPolicy`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_llm.modules.policy import Generation, TurnPolicy
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.utils.fingerprint import fingerprint

Player = Callable[[str, random.Random], str]
"""``player(context, rng)``: the text of a turn. ``context`` is the conversation so far as the model
reads it, control tokens of its template included; ``rng`` is all the chance that a player may
use."""


class PlayerError(ValueError):
    """An answer of a player that cannot be imitated."""


class PlayerPolicy(TurnPolicy):
    """Lets a :data:`Player` play, for demonstrations to imitate
    (:class:`~torchrl_llm.objectives.LLMSFTLoss`).

    Chance is keyed by ``(seed, episode_id, turn)``, so an episode does not depend on its neighbors,
    and a resumed run plays the same. The log-probs are ``nan``: a player has none, and a loss that
    would compare with it must not go on.

    Args:
        player: says what to write.
        tokenizer: decodes the context.
        encode: the ids of an answer with its end of the turn, such as
            :meth:`~torchrl_llm.envs.ChatFormatter.answer`.
        max_output_tokens: most tokens of an answer, the end of the turn included.
        min_output_tokens: fewest tokens before the end of the turn, as the model samples;
            default 0.
        seed: the first part of the key of chance, >= 0.
        trained: the policy whose versions the tokens are stamped with; ``None``: 0 for all.

    Raises:
        PlayerError: an answer is longer or shorter, or empty (when it is played): a cut answer
            would be imitated, or an end that the model cannot sample.

    Examples:
        >>> from torchrl_llm.testing.tokenizers import byte_tokenizer
        >>> tokenizer = byte_tokenizer()
        >>> policy = PlayerPolicy(
        ...     lambda context, rng: rng.choice(["hi", "ho"]), tokenizer, lambda text: tokenizer.encode(text), max_output_tokens=4
        ... )
        >>> one = torch.ones(1, dtype=torch.int64)
        >>> policy.generate(one.view(1, 1), one, one, one, slots=one, greedy=False).lengths.tolist()
        [2]
    """

    logprobs_match_trainer = False

    def __init__(
        self,
        player: Player,
        tokenizer: PreTrainedTokenizerBase,
        encode: Callable[[str], Sequence[int]],
        *,
        max_output_tokens: int,
        min_output_tokens: int = 0,
        seed: int = 0,
        trained: TurnPolicy | None = None,
    ) -> None:
        sampling = SamplingConfig(max_output_tokens=max_output_tokens, min_output_tokens=min_output_tokens)
        super().__init__(sampling, seed=seed)
        self.player, self.tokenizer, self.encode = player, tokenizer, encode
        # Not as a submodule: its weights are not part of this policy.
        self.__dict__["trained"] = trained

    def fingerprint(self) -> str:
        """Also of the player."""
        return fingerprint((super().fingerprint(), self.player))

    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Ask the player for every row; see :meth:`TurnPolicy.generate`. ``greedy`` changes
        nothing."""
        contexts = [ids[:length] for ids, length in zip(prompt.tolist(), lengths.tolist(), strict=True)]
        places = zip(contexts, episode_id.tolist(), turn.tolist(), strict=True)
        answers = [torch.tensor(self._answer_to(*place)) for place in places]
        tokens = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)
        missing = self.sampling.max_output_tokens - tokens.shape[1]
        tokens = torch.nn.functional.pad(tokens, (0, missing)).to(prompt.device)
        sizes = torch.tensor([len(answer) for answer in answers], device=prompt.device)
        version = self.policy_version if self.trained is None else self.trained.policy_version
        unknown = torch.full(tokens.shape, float("nan"), device=prompt.device)
        return Generation(tokens, sizes, unknown, torch.full_like(tokens, version))

    def _answer_to(self, context: list[int], episode: int, turn: int) -> Sequence[int]:
        text = str(self.tokenizer.decode(context, clean_up_tokenization_spaces=False))
        answer = self.player(text, random.Random(f"{self.seed} {episode} {turn}"))
        if not answer.strip():
            raise PlayerError(
                f"The player's answer is {answer!r:.80}: there is nothing to imitate; expected some text."
            )
        ids, fewest, most = self.encode(answer), self.sampling.min_output_tokens, self.sampling.max_output_tokens
        if not fewest < len(ids) <= most:
            raise PlayerError(
                f"The player's answer {answer[:80]!r} has {len(ids)} tokens, its end of the turn included; expected {fewest + 1} to "
                f"{most} (min_output_tokens={fewest}, max_output_tokens={most})."
            )
        return ids
