"""An engine that shares a GPU with the trainer sleeps whenever the trainer computes."""

from contextlib import contextmanager

from small_runs import small_config

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.modules import HFPolicy
from torchrl_llm.runs import build_run
from torchrl_llm.runs.build import make_optimizer
from torchrl_llm.testing.tiny import load_tiny_model
from torchrl_llm.trainers import LLMTrainer
from torchrl_llm.weight_update import EngineWeightSync


class Sleeper(HFPolicy):
    """An engine with a model of its own that gives its memory to the trainer."""

    owns_weights, asleep = True, False

    def generate(self, *args, **options):
        assert not self.asleep
        return super().generate(*args, **options)

    def sleep(self, level=1):
        self.asleep = True

    def wake_up(self):
        self.asleep = False

    @contextmanager
    def updating(self, version):
        with super().updating(version):
            yield
        self.wake_up()


def test_an_engine_sleeps_while_dynamic_sampling_scores(tmp_path):
    config = small_config(tmp_path, "LLMPPO", group_size=2, dynamic_sampling=2, max_iterations=2)
    run, asleep = build_run(config), []
    engine = Sleeper(load_tiny_model(), run.tokenizer, run.policy.sampling)
    collector = TurnCollector(run.trainer.collector.env, engine, batch_size=8, replay_buffer=run.trainer.replay_buffer)
    trainer = LLMTrainer(
        collector=collector,
        replay_buffer=run.trainer.replay_buffer,
        policy=engine,
        loss=run.trainer.loss,
        optimizer=make_optimizer(config, run.models),
        config=config.trainer,
        accelerator=run.trainer.accelerator,
        weight_sync=EngineWeightSync(run.models.model, policy=engine, sleep_level=1),
    )
    score = trainer.scorer.score
    trainer.scorer.score = lambda rows: (asleep.append(engine.asleep), score(rows))[1]
    trainer.train()
    assert engine.policy_version == 2
    assert len(asleep) >= 2
    assert all(asleep)
