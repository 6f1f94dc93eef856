"""What the tests of the objectives share: ragged conversations and a tiny real language model."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from torchrl_llm import functional as F

VOCAB = 11
DOUBLE = torch.float64


def close(actual: Tensor, expected: Tensor | list | float, atol: float = 1e-10) -> None:
    """Equal but for rounding, compared in float64."""
    expected = torch.as_tensor(expected, dtype=DOUBLE)
    torch.testing.assert_close(actual.to(DOUBLE), expected, rtol=1e-10, atol=atol)


def law(*strategies, examples: int = 40):
    """A property that holds for everything the strategies give."""
    return lambda test: settings(deadline=None, max_examples=examples, derandomize=True)(given(*strategies)(test))


@st.composite
def layouts(draw, max_rows: int = 4, max_turns: int = 5):
    """Per row and turn: (was it played, feedback tokens before it, action tokens in it)."""
    turns = draw(st.integers(1, max_turns))
    turn = st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 3))
    row = st.lists(turn, min_size=turns, max_size=turns)
    return draw(st.lists(row, min_size=1, max_size=max_rows)), draw(st.integers(0, 2**31))


def make_rows(layout, seed: int = 0, group_size: int = 1) -> TensorDict:
    """Rows in float64 from a layout; every figure off its mask is NaN, so that nobody may read it.

    Some turns earn 0, and some episodes nothing at all. A group has one task: its conversations
    begin with the same context.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, group_id = len(layout), torch.arange(len(layout)) // group_size
    first = group_id * group_size
    layout = [
        [(row[0][0], layout[i][0][1], row[0][2]), *row[1:]] for row, i in zip(layout, first.tolist(), strict=True)
    ]
    ids = [
        [-1] + [t for k, (played, gap, n) in enumerate(row) for t in [-1] * gap + [k] * (n * played)] for row in layout
    ]
    length = max(map(len, ids)) + 1
    turn_ids = torch.tensor([row + [-1] * (length - len(row)) for row in ids])
    mask = torch.tensor([[played for played, _, _ in row] for row in layout])
    attention = torch.arange(length) < torch.tensor([[len(row)] for row in ids])

    def noise(shape, where):
        x = torch.randn(shape, generator=generator, dtype=DOUBLE)
        return torch.where(where, x, torch.nan)

    action = turn_ids >= 0
    context = torch.arange(length) <= torch.tensor([[row[0][1]] for row in layout])
    ended = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    cut = (torch.rand(rows, 1, generator=generator) < 0.5) & ended
    sample = -noise(action.shape, action).abs()
    # A generator of its own: rewards that are 0, and episodes that earn nothing.
    sparse = torch.Generator().manual_seed(seed + 1)
    earns = (torch.rand(mask.shape, generator=sparse) < 0.7) & (torch.rand(rows, 1, generator=sparse) < 0.8)
    tokens = torch.randint(0, VOCAB, turn_ids.shape, generator=generator)
    return TensorDict(
        {
            "tokens": torch.where(context, tokens[first], tokens).where(attention, 0),
            "attention_mask": attention,
            "turn_ids": turn_ids,
            "turn": {
                "reward": torch.where(mask & ~earns, 0.0, noise(mask.shape, mask)),
                "mask": mask,
                "terminated": ended & ~cut,
                "truncated": cut,
            },
            "state_value": noise(action.shape, action),
            "bootstrap_value": torch.randn(rows, generator=generator, dtype=DOUBLE),
            "sample_log_prob": sample,
            "old_log_prob": sample + 0.1 * noise(action.shape, action),
            "ref_log_prob": sample + 0.3 * noise(action.shape, action),
            "theta": sample + 0.3 * noise(action.shape, action),
            "theta_value": noise(action.shape, action),
            "advantage": noise(action.shape, action),
            "value_target": noise(action.shape, action),
            "group_id": group_id,
        },
        batch_size=[rows],
    )


LAYOUT = [
    [(True, 1, 3), (True, 2, 2), (True, 1, 1)],
    [(True, 0, 1), (True, 1, 0), (True, 1, 2)],
    [(True, 2, 2), (False, 0, 0), (True, 1, 2)],
    [(True, 1, 3), (False, 0, 0), (False, 0, 0)],
    [(True, 1, 1), (True, 2, 3), (False, 0, 0)],
    [(True, 2, 2), (True, 1, 0), (False, 0, 0)],
]
"""Six conversations with turns without tokens, gaps, and one to three turns."""


def turns_of(rows) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Rewards, turn mask and turn ids of rows, which turns have tokens, and how many turns there
    are."""
    turn, ids = rows["turn"], rows["turn_ids"]
    return turn["reward"], turn["mask"], ids, F.turn_lengths(ids, turn["mask"].shape[1]) > 0, turn["mask"].shape[1]


def tokens_of(ids: Tensor, row: int, turn: int) -> list[int]:
    """The positions of a turn in a row."""
    return [i for i, k in enumerate(ids[row].tolist()) if k == turn]


class LanguageModel(nn.Module):
    """A GPT-2 with a head: token log-probs and entropy, or values, in the frame of the rows.

    GPT-2, because it is float64 all through; Qwen2 and Llama take norms, rotations and the softmax
    in float32.
    """

    def __init__(self, outputs: int, seed: int) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_inner=16,
            n_layer=1,
            n_head=2,
            n_positions=64,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.backbone = GPT2Model._from_config(config, attn_implementation="eager").to(DOUBLE)
            self.head = nn.Linear(16, outputs, dtype=DOUBLE)
            nn.init.normal_(self.head.weight)

    def logits(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.backbone(input_ids=tokens, attention_mask=attention_mask.long()).last_hidden_state)


class Scorer(LanguageModel):
    def forward(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self.logits(tokens, attention_mask)[:, :-1].log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        shifted = (nn.functional.pad(x, (1, 0)) for x in (chosen, entropy))
        return tuple(torch.where(turn_ids >= 0, x, 0.0) for x in shifted)


class Values(LanguageModel):
    def forward(self, tokens: Tensor, attention_mask: Tensor, turn_ids: Tensor) -> tuple[Tensor, Tensor]:
        value = self.logits(tokens, attention_mask).squeeze(-1)
        last = attention_mask.sum(1, keepdim=True) - 1
        return nn.functional.pad(value[:, :-1], (1, 0)), value.gather(1, last).squeeze(1)


def make_actor(seed: int = 1) -> TensorDictModule:
    return TensorDictModule(
        Scorer(VOCAB, seed), in_keys=["tokens", "attention_mask", "turn_ids"], out_keys=["log_prob", "entropy"]
    )


def make_critic(seed: int = 2) -> TensorDictModule:
    return TensorDictModule(
        Values(1, seed), in_keys=["tokens", "attention_mask", "turn_ids"], out_keys=["state_value", "bootstrap_value"]
    )


def table_actor() -> TensorDictModule:
    """Takes its log-probs from the rows' ``"theta"``: its gradient is the loss's; the entropy is
    ``-theta / 2``."""
    return TensorDictModule(lambda x: (x, -x / 2), in_keys=["theta"], out_keys=["log_prob", "entropy"])


def table_critic() -> TensorDictModule:
    return TensorDictModule(
        lambda x: (x, x[:, 0]), in_keys=["theta_value"], out_keys=["state_value", "bootstrap_value"]
    )
