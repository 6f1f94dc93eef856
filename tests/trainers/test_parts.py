"""``Credit``, ``Update`` and ``TrustRegion`` in a loop of one's own."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from small_runs import one_batch, small_config, weights
from tensordict import TensorDict

from torchrl_llm import keys
from torchrl_llm.modules import TokenScorer
from torchrl_llm.objectives import LLMGRPOLoss
from torchrl_llm.runs import ConfigError, build_run
from torchrl_llm.runs.build import make_optimizer
from torchrl_llm.testing.enumerable import EnumerableMDP, tiny_lm
from torchrl_llm.testing.pretended_gpu import pretended_gpu
from torchrl_llm.trainers import Credit, Distributed, DynamicSampling, TrainerConfig, TrustRegion, Update
from torchrl_llm.trainers.distributed import FSDP2, Several


class OneOfSeveral(Distributed):
    """One process that lends rows as several do."""

    nonempty, own_rows = Several.nonempty, Several.own_rows


def one_group(actor, won=True):
    """Rows of one group of the enumerable game, with its rewards or without any."""
    rows = EnumerableMDP().rows(actor)
    rows = rows[rows[keys.GROUP_ID] == 0]
    if not won:
        rows[keys.TURN_REWARD] = torch.zeros_like(rows[keys.TURN_REWARD])
    return rows


def parts(distributed, **config):
    actor = TokenScorer(tiny_lm(0))
    loss, config = LLMGRPOLoss(actor, kl_coeff=0.0), TrainerConfig(**config)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    return (
        actor,
        Credit(loss, config=config, distributed=distributed),
        Update(loss, optimizer, distributed, config=config),
    )


class TestIterations:
    def test_update_counts_them_so_that_a_warmup_ends(self, tmp_path):
        run = build_run(small_config(tmp_path, "LLMPPO", critic_warmup=2, lr_actor=1e-3))
        update = Update(
            run.trainer.loss, make_optimizer(run.config, run.models), run.trainer.distributed, config=run.config.trainer
        )
        rows, actors = (
            run.trainer.scorer(one_batch(run)),
            len(torch.cat([p.flatten() for p in run.models.actor_parameters()])),
        )
        moved = []
        for _ in range(3):
            before = weights(run)
            update(rows)
            moved.append(
                [not part.eq(0).all() for part in (weights(run) - before).split([actors, len(before) - actors])]
            )
        assert moved == [[False, True], [False, True], [True, True]]
        assert update.iteration == 2
        update(rows, 7)
        update(rows)
        assert update.iteration == 8

    @pytest.mark.host  # where accelerate is told to compute
    def test_a_warmup_needs_a_critic(self):
        with pytest.raises(ConfigError, match="critic_warmup=2, but LLMGRPOLoss has no critic"):
            parts(Distributed.of(Accelerator(cpu=True)), critic_warmup=2)


@pytest.mark.host  # where accelerate is told to compute
class TestNothingToLearnFrom:
    @pytest.mark.parametrize("kind", [Distributed, OneOfSeveral])
    def test_update_says_so(self, kind):
        actor, credit, update = parts(kind(Accelerator(cpu=True)))
        rows = one_group(actor, won=False)
        assert DynamicSampling(credit).found(rows) == 0
        with pytest.raises(ValueError, match="no group has an advantage"):
            update(DynamicSampling(credit).choose(rows, 4))
        assert update.iteration == 0

    def test_a_rank_with_nothing_is_lent_a_whole_group(self):
        actor, credit, _ = parts(OneOfSeveral(Accelerator(cpu=True)))
        rows = one_group(actor, won=False)
        lent = credit(DynamicSampling(credit).choose(rows, 4))
        assert lent[keys.EPISODE_ID].equal(rows[keys.EPISODE_ID])
        assert not lent[keys.TURN_MASK].any()


@pytest.mark.host  # which pretends a GPU of its own
def test_rows_to_choose_from_need_name_no_device():
    with pretended_gpu():
        _, credit, _ = parts(Distributed.of(Accelerator()))
        rows = one_group(TokenScorer(tiny_lm(0))).to("cuda")
        rows = TensorDict(dict(rows.items()), rows.batch_size)
        assert rows.device is None
        assert DynamicSampling(credit).choose(rows, 4)[keys.TOKENS].device.type == "cuda"


@pytest.mark.host  # where accelerate is told to compute
@pytest.mark.parametrize(("precision", "match"), [("no", True), ("bf16", False)])
def test_mixed_precision_computes_other_log_probs_than_the_sampler(monkeypatch, precision, match):
    """So the old ones are scored, by default."""
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    actor, credit, update = parts(Distributed.of(Accelerator(cpu=True, mixed_precision=precision)))
    assert credit.scores_old is not match
    assert update.logprobs_match_trainer() is match
    rows = one_group(actor)
    rows[keys.SAMPLE_LOG_PROB] -= 1.0
    region = TrustRegion(update.loss, update.optimizer, rows, 0.1, share=1.0, distributed=update.distributed)
    assert (region.kl() > 0.1) is match


@pytest.mark.host  # where accelerate is told to compute
def test_a_sharding_that_is_not_the_updates_is_refused():
    other = FSDP2(Accelerator(cpu=True), FullyShardedDataParallelPlugin(fsdp_version=2))
    with pytest.raises(ConfigError, match="the Distributed that Update was made with"):
        other.gathered_parameters()


class TestTrainer:
    def test_an_optimizer_that_is_refused_changes_nothing(self, tmp_path):
        trainer = build_run(small_config(tmp_path)).trainer
        before = trainer.schedule, trainer.updater
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
        with pytest.raises(ConfigError):
            trainer.replace_optimizer(stranger)
        assert (trainer.schedule, trainer.updater) == before

    def test_skipped_steps_can_be_set(self, tmp_path):
        trainer = build_run(small_config(tmp_path)).trainer
        trainer.skipped_in_a_row = 3
        assert trainer.updater.skipped_in_a_row == trainer.state_dict()["skipped_in_a_row"] == 3
