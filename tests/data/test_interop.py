"""Rows through TorchRL's own GRPOLoss and MCAdvantage."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.transforms import Compose
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import GPT2Config, GPT2LMHeadModel

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.data import TurnsToSequence
from torchrl_llm.data.interop import MC_ADVANTAGE_KEYS, GRPOActor, RowsAsTrajectories, ScoredTokens, to_grpo_keys
from torchrl_llm.envs import GEMEnv
from torchrl_llm.modules import HFPolicy, SamplingConfig, TokenScorer
from torchrl_llm.objectives import GroupRelative, LLMGRPOLoss
from torchrl_llm.testing.policies import ScriptedPolicy
from torchrl_llm.testing.tiny import load_tiny_model, load_tiny_tokenizer

VOCABULARY = 13
GAME = "game:GuessTheNumber-v0-easy"


def small_model(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2, because it is float64 all through; random enough that its distributions are not
    flat."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        attn_pdrop=0,
        embd_pdrop=0,
        resid_pdrop=0,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).double().eval()


@st.composite
def conversations(draw):
    """``turn_ids`` of rows: prompts, turns of 1 to 3 tokens, feedback of 0 to 2, rows without any
    action; and a seed."""
    rows = [[-1, 0, 0, 0, -1, 1, 1, 1, -1, -1]]
    for turns in draw(st.lists(st.integers(0, 3), max_size=3)):
        row = [-1] * draw(st.integers(1, 3))
        for k in range(turns):
            row += [k] * draw(st.integers(1, 3)) + [-1] * draw(st.integers(0, 2))
        rows.append(row)
    return rows, draw(st.integers(0, 2**31))


def make_rows(layout: list[list[int]], seed: int, scorer: TokenScorer) -> TensorDict:
    """Rows whose old policy is near the scorer's, so that some ratios are clipped; NaN where
    nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, layout)) + 1
    ids = torch.tensor([row + [-1] * (width - len(row)) for row in layout])
    attention = torch.arange(width) < torch.tensor([[len(row)] for row in layout])
    tokens = torch.randint(VOCABULARY, ids.shape, generator=generator).where(attention, 0)
    rows = TensorDict({"tokens": tokens, "attention_mask": attention, "turn_ids": ids}, [len(layout)])
    with torch.no_grad():
        log_prob = scorer(rows.copy())["log_prob"]

    def near(spread: float) -> Tensor:
        noise = spread * torch.randn(ids.shape, generator=generator, dtype=torch.float64)
        return torch.where(ids >= 0, log_prob + noise, torch.nan)

    rows["sample_log_prob"], rows["old_log_prob"], rows["ref_log_prob"] = near(0.5), near(0.3), near(0.5)
    rows["advantage"] = near(1.0) - log_prob
    return rows


def value_and_gradient(stock_or_ours: torch.nn.Module, rows: TensorDict, model: torch.nn.Module):
    model.zero_grad()
    terms = {key: term for key, term in stock_or_ours(rows).items() if key.startswith("loss_") and term is not None}
    loss = torch.stack([term.sum() for term in terms.values()]).sum()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def law(test):
    return settings(max_examples=15, derandomize=True)(given(conversations(), st.booleans())(test))


class TestGRPOLoss:
    """Against ours, in float64; TorchRL holds the bounds of its clip in float32, which values show
    and gradients not."""

    OURS: ClassVar = {"kl_coeff": 0.0, "clip_epsilon": (0.2, 0.28)}
    STOCK: ClassVar = {"masking_strategy": "rlhf", "entropy_bonus": False, "clip_epsilon": (0.2, 0.28)}

    @pytest.fixture(scope="class")
    def model(self):
        return small_model()

    def compare(self, model, case, old: bool, ours: dict, stock: dict, *, entropy: bool = False) -> None:
        scorer = TokenScorer(model, entropy=entropy)
        rows = make_rows(*case, scorer)
        rows = rows if old else rows.exclude("old_log_prob")
        expected = value_and_gradient(LLMGRPOLoss(scorer, **(self.OURS | ours)), rows, model)
        actual = value_and_gradient(GRPOLoss(GRPOActor(scorer), **(self.STOCK | stock)), to_grpo_keys(rows), model)
        assert float(expected[1].norm()) > 0
        # Our loss weights are float32.
        torch.testing.assert_close(actual[0], expected[0], rtol=2e-7, atol=2e-7)
        torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=2e-7 * float(expected[1].norm()))

    @law
    def test_value_and_gradient_are_ours(self, model, case, old):
        self.compare(model, case, old, {}, {})

    @law
    def test_prompt_mean_is_our_sequence_weighting(self, model, case, old):
        case = ([row for row in case[0] if max(row) >= 0], case[1])
        self.compare(model, case, old, {"weighting": "sequence"}, {"aggregation": "prompt_mean"})

    @law
    def test_entropy_bonus(self, model, case, old):
        stock = {"entropy_bonus": True, "entropy_coeff": 0.1}
        self.compare(model, case, old, {"entropy_coeff": 0.1}, stock, entropy=True)

    def test_the_kl_is_a_mean_over_all_positions(self, model):
        """TorchRL's term is ours times the share of positions that are action tokens, where the
        ratio is 1."""
        scorer = TokenScorer(model)
        rows = make_rows([[-1, 0, 0, -1, 1], [-1, 0, -1, -1, -1, -1, -1]], 0, scorer)
        with torch.no_grad():
            rows["old_log_prob"] = scorer(rows.copy())["log_prob"]
        share = float((rows["turn_ids"] >= 0).double().mean())
        assert share == 4 / 16
        ours = LLMGRPOLoss(scorer, **(self.OURS | {"kl_coeff": 1.0}))(rows)["loss_kl"]
        stock = GRPOLoss(GRPOActor(scorer), **self.STOCK, kl_to_ref_coeff=1.0)(to_grpo_keys(rows)).loss_kl_to_ref
        torch.testing.assert_close(stock, share * ours, rtol=1e-6, atol=0)

    def test_a_step_on_collected_conversations_lowers_the_loss(self):
        """A real model plays a real game; stock GRPOLoss trains it."""
        model, tokenizer = load_tiny_model(), load_tiny_tokenizer()
        sampling = SamplingConfig(max_output_tokens=24)
        env = GEMEnv(GAME, tokenizer=tokenizer, num_envs=4, group_size=4, max_model_len=512, max_output_tokens=24)
        policy = HFPolicy(model, tokenizer, sampling)
        (batch,) = TurnCollector(env, policy, batch_size=8, total_batches=1)
        rows = GroupRelative()(batch)
        assert float(rows["advantage"].abs().max()) > 0
        stock = GRPOLoss(
            GRPOActor(TokenScorer(model, policy.sampling)),
            masking_strategy="rlhf",
            entropy_bonus=False,
        )
        optimizer = torch.optim.SGD(stock.parameters(), lr=1e-2)
        batch = to_grpo_keys(rows)
        before = stock(batch)
        torch.testing.assert_close(before.ESS, torch.ones(()), rtol=0, atol=1e-4)  # on-policy
        before.loss_objective.backward()
        optimizer.step()
        assert stock(batch).loss_objective.item() < before.loss_objective.item() - 1e-5

    def test_the_actor_holds_the_model_s_own_parameters(self, model):
        stock = GRPOLoss(GRPOActor(TokenScorer(model)), **self.STOCK)
        assert {id(p) for p in stock.parameters()} == {id(p) for p in model.parameters()}

    def test_errors(self, model):
        scorer = TokenScorer(model)
        rows = make_rows([[-1, 0, 0]], 0, scorer)
        with pytest.raises(KeyError, match=r"'advantage' is missing.*Run an advantage estimator"):
            to_grpo_keys(rows.exclude("advantage"))
        with pytest.raises(KeyError, match="'sample_log_prob' is missing"):
            to_grpo_keys(rows.exclude("old_log_prob", "sample_log_prob"))
        with pytest.raises(ValueError, match=r"entropy=True.*entropy_bonus=False"):
            GRPOLoss(GRPOActor(scorer), masking_strategy="rlhf")(to_grpo_keys(rows))
        dist = GRPOActor(scorer).get_dist(to_grpo_keys(rows))
        assert isinstance(dist, ScoredTokens)
        with pytest.raises(ValueError, match="Only the scored tokens"):
            dist.log_prob(rows["tokens"] + 1)


class TestMCAdvantage:
    """Four guessers a group, who name numbers of their own: games of one to four turns, of many
    returns."""

    GROUP = 4

    def collect(self, tokenizer, groups: MCAdvantage, batches: int = 1, batch_size: int = 12):
        def guess(episode: int, turn: int, _: str) -> str:
            return f"\\boxed{{{(7 * episode + 3 * turn) % 10 + 1}}}"

        env = GEMEnv(GAME, tokenizer=tokenizer, num_envs=4, group_size=self.GROUP, max_model_len=2048)
        policy = ScriptedPolicy(guess, tokenizer=tokenizer)
        to_rows = TurnsToSequence(max_model_len=2048, max_turns=4)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(batches * batch_size),
            transform=Compose(groups, RowsAsTrajectories(), to_rows),
            batch_size=batch_size,
        )
        collector = TurnCollector(env, policy, batch_size=batch_size, total_batches=batches, replay_buffer=buffer)
        for _ in collector:
            pass
        return buffer

    def test_advantages_are_those_of_group_relative(self, tokenizer):
        buffer = self.collect(tokenizer, MCAdvantage(self.GROUP, **MC_ADVANTAGE_KEYS))
        rows = buffer[:]
        assert rows.shape == (12,)
        assert len(set(rows["turn", "mask"].sum(1).tolist())) > 1
        assert len(set(rows["turn", "reward"].sum(1).tolist())) > 3
        ours = GroupRelative(eps=0.0)(rows.exclude("advantage"))
        torch.testing.assert_close(rows["advantage"], ours["advantage"], rtol=1e-5, atol=1e-5)
        assert float(rows["advantage"].abs().max()) > 0.5
        sample = buffer.sample()
        assert sample["advantage"].shape == sample["turn_ids"].shape

    def test_groups_outlive_the_buffer_s_emptying_until_they_are_cleared(self, tokenizer):
        rows = self.collect(tokenizer, MCAdvantage(self.GROUP, **MC_ADVANTAGE_KEYS))[:].exclude("advantage")
        groups = MCAdvantage(self.GROUP, **MC_ADVANTAGE_KEYS)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(12), transform=Compose(groups, RowsAsTrajectories()), batch_size=4
        )
        for cleared, stored in ((False, 4), (True, 0)):
            buffer.extend(rows[:2])
            assert len(buffer) == 0
            buffer.empty()
            if cleared:
                groups.clear_queues()
            buffer.extend(rows[2:4])
            assert len(buffer) == stored
            buffer.empty()

    def test_without_mc_advantage_nothing_can_be_sampled(self, tokenizer):
        rows = self.collect(tokenizer, MCAdvantage(self.GROUP, **MC_ADVANTAGE_KEYS))[:].exclude(("turn", "advantage"))
        with pytest.raises(KeyError, match=r"'advantage'\) is missing"):
            RowsAsTrajectories()(rows)

    def test_dynamic_sampling_drops_whole_groups(self, tokenizer):
        """Nothing passes upstream of a dropped group: ``None`` goes through, and the storage stays
        empty."""
        groups = MCAdvantage(self.GROUP, **MC_ADVANTAGE_KEYS, keep_return_bounds=(10.0, 20.0))
        buffer = self.collect(tokenizer, groups)
        assert len(buffer) == 0
        assert groups.dropped_groups == 3
