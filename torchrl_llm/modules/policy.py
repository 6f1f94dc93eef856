"""The base class of policies: :class:`TurnPolicy`, an inference engine on top of ``generate``.

A policy maps the context of each slot to the sampled response of one turn. Engines
(:mod:`torchrl_llm.modules.hf`, :mod:`torchrl_llm.modules.vllm`) implement
:meth:`TurnPolicy.generate` for the active slots only; the base class handles idle slots, padding,
turn ids and versions, so that they mean the same for every engine.

There are two ways to sample: a call with a TensorDict answers one turn of every active slot;
:meth:`TurnPolicy.submit` and :meth:`TurnPolicy.poll` answer single turns, in the order in which
they finish.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_llm import keys
from torchrl_llm.modules.engine import InferenceEngine, TurnRequest, TurnResponse
from torchrl_llm.modules.sampling import SamplingConfig
from torchrl_llm.utils.fingerprint import fingerprint


class Generation(NamedTuple):
    """The responses of the active slots.

    Attributes:
        tokens: ``[n, A]`` int64, right-padded; the stop id is included.
        lengths: ``[n]`` int64, number of valid tokens of each response, >= 1.
        log_probs: ``[n, A]`` float32, under the distribution really sampled from.
        versions: ``[n, A]`` int64, the weights that each token was sampled with; ``None``:
            ``policy_version`` for all.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor
    versions: Tensor | None = None


class TurnPolicy(TensorDictModuleBase, InferenceEngine):
    """Base class of policies that answer one turn of every active slot in one call.

    Reads the context (``("tokens", "prompt")`` ``[N, L]``, ``("tokens", "prompt_length")``
    ``[N, 1]``, ``"turn"`` ``[N, 1]``, ``"episode_id"`` ``[N, 1]``) and writes
    ``("tokens", "response")``, ``("tokens", "response_mask")``, ``("tokens", "log_probs")``,
    ``"turn_ids"`` and ``"policy_version"``, all ``[N, A]`` with ``A = sampling.max_output_tokens``.
    A slot whose ``prompt_length`` is 0 idles: it costs nothing and its response is empty.

    Sampling noise is keyed by ``(seed, episode_id, turn)``, so an episode does not depend on its
    neighbors in the batch. Under ``ExplorationType.DETERMINISTIC`` (or ``MODE``) decoding is
    greedy.

    It is an :class:`~torchrl_llm.modules.InferenceEngine`. A subclass writes :meth:`generate`; an
    engine with weights of its own writes :meth:`load` and :meth:`log_probs` too, and an engine that
    batches continuously :meth:`submit`, :meth:`poll`, :meth:`cancel` and :attr:`pending`.

    Args:
        sampling: how responses are sampled.
        seed: the first part of the noise key, >= 0.

    Attributes:
        policy_version: int, stamped on every token; :meth:`weights_changed` raises it by one.
    """

    # TorchRL refuses policies with these two that do not derive from TensorDictModuleBase.
    in_keys = [keys.PROMPT, keys.PROMPT_LENGTH, keys.TURN, keys.EPISODE_ID]  # noqa: RUF012 (TorchRL's idiom)
    out_keys = [keys.RESPONSE, keys.RESPONSE_MASK, keys.RESPONSE_LOG_PROBS, keys.TURN_IDS, keys.POLICY_VERSION]  # noqa: RUF012

    def __init__(self, sampling: SamplingConfig, *, seed: int = 0) -> None:
        super().__init__()
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected an int >= 0.")
        self.sampling = sampling
        self.seed = seed
        self.policy_version = 0
        self._queue: list[TurnRequest] = []

    def fingerprint(self) -> str:
        """What tells this policy from others, as a player: a hash of its class, its sampling and
        its seed, and of what a subclass adds."""
        return fingerprint((type(self), self.sampling, self.seed))

    @abstractmethod
    def generate(
        self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor, *, slots: Tensor, greedy: bool
    ) -> Generation:
        """Sample one response per row.

        Args:
            prompt: ``[n, L]`` int64 contexts of the active slots, right-padded.
            lengths: ``[n]`` int64, > 0.
            turn: ``[n]`` int64.
            episode_id: ``[n]`` int64.
            slots: ``[n]`` int64, the index of each row in the full batch (a key for caches, never
                for noise).
            greedy: take the likeliest token instead of sampling.
        """

    # ---------------------------------------- single turns

    def submit(self, request: TurnRequest) -> None:
        """Request one turn; :meth:`poll` answers it.

        No two requests may share a slot at a time; once answered or cancelled, the slot may be used
        again. The prompt may be a view that changes after the answer.
        """
        self._queue.append(request)

    @property
    def pending(self) -> int:
        """Number of requests that are not answered yet."""
        return len(self._queue)

    def cancel(self, slots: Sequence[int] | None = None) -> None:
        """Drop the requests of ``slots`` (default: all), if there are any; they are never
        answered."""
        self._queue = [] if slots is None else [request for request in self._queue if request.slot not in slots]

    def poll(self) -> list[TurnResponse]:
        """Advance what was submitted, and return the answers that are finished, in any order.

        Engines that batch continuously take one step. The base class answers everything at once, in
        one call of :meth:`generate` for all that is sampled, and one for all that is greedy.
        """
        queue, self._queue = self._queue, []
        batches = {greedy: [request for request in queue if request.greedy is greedy] for greedy in (False, True)}
        return [answer for greedy, batch in batches.items() if batch for answer in self._answer(batch, greedy=greedy)]

    @torch.no_grad()
    def _answer(self, requests: list[TurnRequest], *, greedy: bool) -> list[TurnResponse]:
        self.check_usable()
        lengths = torch.tensor([len(request.prompt) for request in requests])
        prompt = np.zeros((len(requests), int(lengths.max())), np.int64)
        for row, request in zip(prompt, requests, strict=True):
            row[: len(request.prompt)] = request.prompt
        slots, turn, episode_id = torch.tensor([(r.slot, r.turn, r.episode_id) for r in requests]).T
        generation = self.generate(torch.from_numpy(prompt), lengths, turn, episode_id, slots=slots, greedy=greedy)
        tokens, sizes, log_probs = (x.cpu().numpy() for x in generation[:3])
        versions = self._versions(generation).cpu().numpy()
        return [
            TurnResponse(request.slot, tokens[i, :m], log_probs[i, :m], versions[i, :m])
            for i, (request, m) in enumerate(zip(requests, sizes, strict=True))
        ]

    def _versions(self, generation: Generation) -> Tensor:
        if generation.versions is not None:
            return generation.versions
        return torch.full_like(generation.tokens, self.policy_version)

    # ---------------------------------------- whole batches

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the response keys of one turn into ``tensordict`` (batch ``[N]``) and return it.

        Raises:
            ValueError: a ``prompt_length`` is greater than the prompt is wide.
        """
        prompt = tensordict[keys.PROMPT]
        prompt = prompt.reshape(-1, prompt.shape[-1])
        lengths, turn, episode_id = (tensordict[key].flatten() for key in self.in_keys[1:])
        response = self._respond(prompt, lengths, turn, episode_id)
        for key, value in zip(self.out_keys, response, strict=True):
            tensordict.set(key, value.view(*tensordict.batch_size, -1))
        return tensordict

    def _respond(self, prompt: Tensor, lengths: Tensor, turn: Tensor, episode_id: Tensor) -> tuple[Tensor, ...]:
        """The values ``[N, A]`` of ``out_keys`` for all slots: 0, False, 0, -1 and -1 off the
        mask."""
        self.check_usable()
        tokens = torch.zeros(len(lengths), self.sampling.max_output_tokens, dtype=torch.int64, device=lengths.device)
        log_probs, mask = torch.zeros_like(tokens, dtype=torch.float32), torch.zeros_like(tokens, dtype=torch.bool)
        turn_ids, versions = torch.full_like(tokens, -1), torch.full_like(tokens, -1)
        slots = lengths.nonzero().flatten()
        if not slots.numel():
            return tokens, mask, log_probs, turn_ids, versions
        longest = int(lengths.max())
        if longest > prompt.shape[-1]:
            raise ValueError(
                f"{keys.PROMPT_LENGTH} says {longest} tokens, but {keys.PROMPT} has only {prompt.shape[-1]} columns; "
                "expected a right-padded prompt at least as wide as its longest row."
            )
        # The observation is as wide as max_model_len; engines get the columns that are used.
        rows = prompt[slots, :longest], lengths[slots], turn[slots], episode_id[slots]
        greedy = exploration_type() in (ExplorationType.DETERMINISTIC, ExplorationType.MODE)
        generation = self.generate(*rows, slots=slots, greedy=greedy)
        valid = torch.arange(tokens.shape[-1], device=tokens.device) < generation.lengths.unsqueeze(-1)
        mask[slots] = valid
        # What lies behind the end of a response is undefined: engines may sample on until a whole
        # batch is finished.
        tokens[slots] = generation.tokens.masked_fill(~valid, 0)
        log_probs[slots] = generation.log_probs.masked_fill(~valid, 0.0)
        turn_ids[slots] = torch.where(valid, turn[slots].unsqueeze(-1), -1)
        versions[slots] = self._versions(generation).masked_fill(~valid, -1)
        return tokens, mask, log_probs, turn_ids, versions
