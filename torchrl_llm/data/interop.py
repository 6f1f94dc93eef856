"""Rows for TorchRL's own language-model components: its ``GRPOLoss`` and its ``MCAdvantage``.

TorchRL computes; this module only renames keys, adapts shapes and wraps a scorer as the actor that
its loss asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs.transforms import Transform

from torchrl_llm import keys
from torchrl_llm.functional import turn_to_token

_TOKENS = ("tokens", "full")
_LOG_PROBS = ("log_probs", "full")
_REF_LOG_PROBS = ("next", "ref_log_probs", "full")
_ASSISTANT_MASK = ("masks", "all_assistant_mask")
_ATTENTION_MASK = ("masks", "all_attention_mask")
_DONE = "done"

MC_ADVANTAGE_KEYS: dict[str, Any] = {
    "prompt_key": keys.GROUP_ID,
    "rewards_key": keys.TURN_REWARD,
    "advantage_key": keys.TURN_ADVANTAGE,
    "done_key": _DONE,
    "trajectory_return": "sum",
}
"""What ``MCAdvantage`` takes to compare the returns of rows, see :class:`RowsAsTrajectories`."""


def to_grpo_keys(rows: TensorDictBase) -> TensorDict:
    """Rows under the keys that ``torchrl.objectives.llm.GRPOLoss`` reads; its actor is a
    :class:`GRPOActor`.

    On the same rows, with the same clip and without KL, ``GRPOLoss(actor, masking_strategy="rlhf",
    entropy_bonus=False)`` and :class:`~torchrl_llm.objectives.LLMGRPOLoss` have the same value and
    gradient: ``aggregation="token_mean"`` is our ``weighting="token"``, and ``"prompt_mean"`` is
    ``"sequence"`` where every row has an action. What differs (TorchRL 0.14.1):

    - ``kl_to_ref_coeff``: the mean is taken over all ``B * L`` positions, so that the term shrinks
      with the padding and the feedback, and without the ratio to the policy that sampled. Ours is
      the mean over action tokens, with it.
    - means are taken over the rows it is given: with micro-batches they are means of means.
    - ``kl_approx`` and ``clip_fraction`` are means over all positions too, and the former is the k1
      estimate.

    Args:
        rows: ``[B]`` rows with ``"tokens"``, ``"attention_mask"``, ``"turn_ids"``, ``"advantage"``
            ``[B, L]`` (run an estimator first) and ``"old_log_prob"`` or, without it,
            ``"sample_log_prob"``; ``"ref_log_prob"`` if there is one.

    Returns:
        ``[B]``: ``("tokens", "full")``, ``("masks", all_attention_mask / all_assistant_mask)``,
        ``("log_probs", "full")``, ``("next", "ref_log_probs", "full")`` and ``"turn_ids"``
        ``[B, L]``, ``"advantage"`` ``[B, L, 1]``. Values off actions are 0.

    Raises:
        KeyError: a key is missing.

    Examples:
        >>> ids = torch.tensor([[-1, 0, 0]])
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[5, 6, 7]]), attention_mask=ids > -2, turn_ids=ids, sample_log_prob=-torch.rand(1, 3),
        ...     advantage=torch.tensor([[0.0, 2.0, 2.0]]), batch_size=[1])
        >>> grpo = to_grpo_keys(rows)
        >>> grpo["advantage"].shape, grpo["masks", "all_assistant_mask"].tolist()
        (torch.Size([1, 3, 1]), [[False, True, True]])
    """
    action = _required(rows, keys.TURN_IDS) >= 0

    def on_actions(key: keys.NestedKey) -> Tensor:
        return torch.where(action, _required(rows, key).detach(), 0.0)

    has_old = rows.get(keys.OLD_LOG_PROB, None) is not None
    renamed: dict[keys.NestedKey, Tensor] = {
        _TOKENS: _required(rows, keys.TOKENS),
        _ATTENTION_MASK: _required(rows, keys.ATTENTION_MASK),
        _ASSISTANT_MASK: action,
        _LOG_PROBS: on_actions(keys.OLD_LOG_PROB if has_old else keys.SAMPLE_LOG_PROB),
        # GRPOLoss takes advantage.shape[:-1] for the shape of the log-probs.
        keys.ADVANTAGE: on_actions(keys.ADVANTAGE).unsqueeze(-1),
        keys.TURN_IDS: rows[keys.TURN_IDS],
    }
    if rows.get(keys.REF_LOG_PROB, None) is not None:
        renamed[_REF_LOG_PROBS] = on_actions(keys.REF_LOG_PROB)
    return TensorDict(renamed, batch_size=action.shape[:1], device=rows.device)


def _required(rows: TensorDictBase, key: keys.NestedKey) -> Tensor:
    value = rows.get(key, None)
    if value is None:
        hint = {keys.ADVANTAGE: "Run an advantage estimator first.", keys.TURN_ADVANTAGE: "MCAdvantage writes it."}
        raise KeyError(f"{key!r} is missing; given are {sorted(map(str, rows.keys()))}. {hint.get(key, '')}".rstrip())
    return value


class ScoredTokens(Distribution):
    """The scores of given tokens as a distribution, which ``GRPOLoss`` asks of its actor.

    Args:
        tokens: ``[B, L]`` int64, the tokens that were scored.
        mask: ``[B, L]`` bool, the action tokens; the loss is taken over these.
        log_probs: ``[B, L]``.
        entropies: ``[B, L]``; ``None``: not known.

    Examples:
        >>> tokens = torch.tensor([[5, 6]])
        >>> ScoredTokens(tokens, tokens > 5, torch.tensor([[0.0, -0.7]])).log_prob(tokens)
        tensor([[ 0.0000, -0.7000]])
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as declared by the base class)

    def __init__(self, tokens: Tensor, mask: Tensor, log_probs: Tensor, entropies: Tensor | None = None) -> None:
        super().__init__(batch_shape=tokens.shape, validate_args=False)
        self.tokens, self.mask = tokens, mask
        self.log_probs, self.entropies = log_probs, entropies

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-probs ``[B, L]`` of the scored tokens; ``ValueError`` for any others."""
        if value.shape != self.tokens.shape or not bool((value == self.tokens)[self.mask].all()):
            raise ValueError(f"Only the scored tokens {tuple(self.tokens.shape)} have log-probs; got others.")
        return self.log_probs

    def entropy(self) -> Tensor:
        """The entropies ``[B, L]``; ``ValueError`` if the scorer did not write them."""
        if self.entropies is None:
            raise ValueError(
                "The scorer writes no entropy: use TokenScorer(..., entropy=True), or entropy_bonus=False."
            )
        return self.entropies


class GRPOActor(TensorDictModuleBase):
    """A scorer as the actor of ``torchrl.objectives.llm.GRPOLoss``, on batches of
    :func:`to_grpo_keys`.

    The mask marks the action tokens, whatever the loss's ``masking_strategy``.

    Args:
        scorer: reads ``"tokens"``, ``"attention_mask"``, ``"turn_ids"`` ``[B, L]``, writes
            ``"log_prob"`` ``[B, L]`` and optionally ``"entropy"``, such as
            :class:`~torchrl_llm.modules.TokenScorer`. It is held as a submodule.

    Examples:
        >>> from torchrl.objectives.llm import GRPOLoss
        >>> from torchrl_llm.modules import TokenScorer
        >>> from torchrl_llm.testing.tiny import load_tiny_model
        >>> actor = GRPOActor(TokenScorer(load_tiny_model()))
        >>> stock_loss = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    """

    def __init__(self, scorer: TensorDictModuleBase) -> None:
        super().__init__()
        self.scorer = scorer
        self.in_keys = [_TOKENS, _ATTENTION_MASK, keys.TURN_IDS]
        self.out_keys = [_LOG_PROBS]

    def get_dist(self, tensordict: TensorDictBase, **_: Any) -> ScoredTokens:
        """Score ``tensordict`` ``[B]``; TorchRL's further arguments name logits, of which there are
        none here."""
        tokens, attention_mask, turn_ids = (tensordict.get(key) for key in self.in_keys)
        rows = {keys.TOKENS: tokens, keys.ATTENTION_MASK: attention_mask, keys.TURN_IDS: turn_ids}
        scored = self.scorer(TensorDict(rows, batch_size=turn_ids.shape[:1], device=tensordict.device))
        return ScoredTokens(tokens, turn_ids >= 0, scored.get(keys.LOG_PROB), scored.get(keys.ENTROPY, None))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("log_probs", "full")`` ``[B, L]``."""
        return tensordict.set(_LOG_PROBS, self.get_dist(tensordict).log_probs)


class RowsAsTrajectories(Transform):
    """Replay-buffer transform between :class:`~torchrl_llm.data.TurnsToSequence` and TorchRL's
    ``MCAdvantage``.

    ``MCAdvantage`` splits its input at done flags; for it a row is a trajectory of one step, with
    the rewards of the turns. On writing, rows get ``"done"`` ``[B, 1]``, all True. On sampling,
    ``("turn", "advantage")``, which ``MCAdvantage`` has written, goes to ``"advantage"`` ``[B, L]``
    by ``"turn_ids"``. ``Compose`` writes from right to left; ``MCAdvantage`` waits for whole
    groups, and nothing is stored until one is complete.

    The advantage is ``(R - mean) / max(std, 1e-6)`` of the undiscounted returns of the group, as in
    :class:`~torchrl_llm.objectives.GroupRelative` with ``eps=0``. An incomplete group stays in
    ``MCAdvantage`` when the buffer is emptied, and later rows of the same ``group_id`` would
    complete it: call its ``clear_queues()`` too.

    Examples:
        >>> from torchrl.data import LazyTensorStorage, ReplayBuffer
        >>> from torchrl.envs.transforms import Compose
        >>> from torchrl.objectives.llm import MCAdvantage
        >>> from torchrl_llm.data import TurnsToSequence
        >>> groups = MCAdvantage(4, **MC_ADVANTAGE_KEYS)
        >>> to_rows = TurnsToSequence(max_model_len=64, max_turns=4)
        >>> buffer = ReplayBuffer(
        ...     storage=LazyTensorStorage(8), transform=Compose(groups, RowsAsTrajectories(), to_rows), batch_size=8)
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        done = torch.ones(*tensordict.batch_size, 1, dtype=torch.bool, device=tensordict.device)
        return tensordict.copy().set(_DONE, done)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Give every action token the advantage of its row."""
        advantage = turn_to_token(_required(tensordict, keys.TURN_ADVANTAGE), tensordict.get(keys.TURN_IDS))
        return tensordict.set(keys.ADVANTAGE, advantage)
