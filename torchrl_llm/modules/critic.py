"""Values of the states before action tokens: :class:`TurnCritic`, one forward per batch of rows.

Returns, advantages and the pooling of token values into turn values belong to the objectives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchrl_llm import keys
from torchrl_llm.modules.adapters import use_adapter
from torchrl_llm.modules.lm import embedding_of
from torchrl_llm.modules.positions import RowModule, action_positions
from torchrl_llm.modules.prefix_attention import PrefixSharing, row_states


class TurnCritic(RowModule):
    """Value of the prefix before every action token, and of the whole row.

    The backbone runs once, without the LM head; a linear value head in float32 (float64 for a
    float64 model) reads the hidden state of the last token of each prefix.

    Reads ``"tokens"``, ``"attention_mask"``, ``"turn_ids"``, all ``[B, L]``; writes
    ``"state_value"`` ``[B, L]``: index i is the value of the tokens before i, 0 where
    ``turn_ids < 0``; and ``"bootstrap_value"`` ``[B]``, the value of the whole row. Neither looks
    at the action it is the baseline of. A gap in ``attention_mask`` starts a segment, which is
    computed as a row of its own (:mod:`torchrl_llm.modules.segments`); ``"bootstrap_value"`` is
    then of the last segment.

    Args:
        model: a model of transformers, with or without its LM head, or a ``PeftModel`` around one.
        adapter: the LoRA adapter to run under; ``None``: the model itself, adapters off.
        prefixes: what :func:`~torchrl_llm.modules.enable_prefix_sharing` returned for the model:
            what rows share is computed once. Default ``None``: every row by itself.
        state_value_key, bootstrap_value_key: where to write.

    Attributes:
        value_head: ``nn.Linear(H, 1)``, zero-initialized: the first value is 0 everywhere, which is
            no baseline at all rather than a random one.

    Raises:
        RowError: rows that are not right-padded, or have an action where none can be (from
            ``forward``).

    Examples:
        >>> from tensordict import TensorDict
        >>> from transformers import Qwen2Config, Qwen2Model
        >>> model = Qwen2Model(Qwen2Config(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_key_value_heads=1))
        >>> critic = TurnCritic(model)
        >>> _ = torch.nn.init.ones_(critic.value_head.bias)
        >>> rows = TensorDict(
        ...     tokens=torch.tensor([[3, 4, 5, 6, 0]]), attention_mask=torch.tensor([[True, True, True, True, False]]),
        ...     turn_ids=torch.tensor([[-1, -1, 0, 0, -1]]), batch_size=[1])
        >>> critic(rows)["state_value"].tolist(), rows["bootstrap_value"].tolist()
        ([[0.0, 0.0, 1.0, 1.0, 0.0]], [1.0])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter: str | None = None,
        prefixes: PrefixSharing | None = None,
        state_value_key: keys.NestedKey = keys.STATE_VALUE,
        bootstrap_value_key: keys.NestedKey = keys.BOOTSTRAP_VALUE,
    ) -> None:
        super().__init__(model, adapter, prefixes, [state_value_key, bootstrap_value_key])
        self.value_head = _zero_head(model)

    def value(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        """``(state_value [B, L], bootstrap_value [B])`` of tensors ``[B, L]``."""
        return self._compute(tokens, attention_mask, turn_ids)

    def _compute_rows(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, ...]:
        positions = action_positions(attention_mask, turn_ids)
        with use_adapter(self.model, self.adapter):
            found = row_states(self.model, tokens[:, : positions.longest], positions.lengths, self.prefixes)
        before = found.places[positions.rows, positions.columns - 1]
        last = found.places.gather(1, positions.lengths.unsqueeze(-1) - 1).squeeze(-1)
        states = found.states.index_select(0, torch.cat([before, last]))
        state_value, bootstrap_value = values_of(self.value_head, states).split([len(positions.rows), len(tokens)])
        return positions.scatter(state_value), bootstrap_value


def values_of(head: nn.Linear, states: Tensor) -> Tensor:
    """The values ``[M]`` of hidden states ``[M, H]``."""
    # Values are sums of rewards, not logits: autocast must not round them to half precision.
    with torch.autocast(states.device.type, enabled=False):
        return head(states.to(head.weight.dtype)).squeeze(-1)


def _zero_head(model: Any) -> nn.Linear:
    weight, config = embedding_of(model), model.config.get_text_config()
    # OPT projects its last states
    width = getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    dtype = torch.promote_types(weight.dtype, torch.float32)
    # skip_init: nn.Linear would take its first weights from the global random generator.
    head = nn.utils.skip_init(nn.Linear, width, 1, dtype=dtype, device=weight.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
