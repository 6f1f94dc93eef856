"""``LLMTrainer``, a loop by hand and TorchRL's ``Trainer`` take the same steps: they are made of
the same parts."""

import torch
from small_runs import small_config, weights
from tensordict import TensorDict
from torchrl.trainers import OptimizationStepper, Trainer

from torchrl_llm.collectors import TurnCollector
from torchrl_llm.runs import build_run
from torchrl_llm.runs.build import make_optimizer
from torchrl_llm.trainers import Credit, DynamicSampling, TrustRegion, Update

SETTINGS = {
    "batch_size": 16, "group_size": 4, "epochs": 2, "minibatch_size": 8, "dynamic_sampling": 3, "target_kl": 1.2e-2, "target_kl_share": 0.5,
    "lr_actor": 1e-3, "schedule": "constant", "max_iterations": 3,
}  # fmt: skip


def by_llm_trainer(folder):
    """The rows that each update may learn from, how many it takes, the share of each update's
    steps, and the weights at the end."""
    run, batches = build_run(small_config(folder, "GRPO", **SETTINGS)), []
    iterate = run.trainer.iterate

    def recorded(rows):
        batches.append(rows.clone())
        return iterate(rows)

    run.trainer.iterate = recorded
    shares = [metrics["optim/step_share"] for metrics in run.trainer.train()]
    return batches, run.trainer.batch_size(batches[0]), shares, weights(run)


def parts(folder):
    """A run that has not begun, and the parts of an update of its loss, with an optimizer of their
    own."""
    run = build_run(small_config(folder, "GRPO", **SETTINGS))
    loss, config, distributed = run.trainer.loss, run.config, run.trainer.distributed
    credit = Credit(loss, config=config.trainer, distributed=distributed)
    return run, credit, Update(loss, make_optimizer(config, run.models), distributed, config=config.trainer)


def by_hand(folder, batches, wanted):
    """The same, of a loop that does each step of an update itself."""
    run, credit, update = parts(folder)
    shares = []
    for rows in batches:
        chosen = credit(DynamicSampling(credit).choose(rows.clone(), wanted))
        region = TrustRegion(
            update.loss, update.optimizer, chosen, SETTINGS["target_kl"], share=0.5, distributed=update.distributed
        )
        for minibatch in (rows for _ in range(SETTINGS["epochs"]) for rows in update.minibatches(chosen)):
            metrics = update.accumulate(update.micro_batches(minibatch))
            if region.settle(metrics["policy/kl_old"]):
                update.optimizer.zero_grad()
                break
            update.step(region)
        region.settle(None)
        shares.append(region.metrics()["optim/step_share"])
    return shares, weights(run)


def by_torchrl(folder, batches, wanted):
    """The same, of TorchRL's ``Trainer``."""
    run, credit, update = parts(folder)
    left, shares = iter(batches), []

    class Stepper(OptimizationStepper):
        def step(self, trainer, sub_batch):
            metrics = update(sub_batch)
            shares.append(metrics["optim/step_share"])
            return TensorDict(metrics)

    trainer = Trainer(
        # What it collects is replaced by the rows.
        collector=TurnCollector(run.trainer.collector.env, run.policy, batch_size=SETTINGS["batch_size"]),
        total_frames=sum(min(wanted, DynamicSampling(credit).found(rows)) for rows in batches),
        frame_skip=1,
        loss_module=update.loss,
        optimizer=update.optimizer,
        optimization_stepper=Stepper(),
        optim_steps_per_batch=1,
        progress_bar=False,
    )
    trainer.register_op("batch_process", lambda _: credit(DynamicSampling(credit).choose(next(left).clone(), wanted)))
    trainer.train()
    return shares, weights(run)


def test_three_loops_take_the_same_steps(tmp_path):
    batches, wanted, shares, expected = by_llm_trainer(tmp_path / "trainer")
    assert len(batches) == 3
    assert min(shares) < 1 == max(shares), "the target bounds some updates and not others"
    assert any(len(rows) > wanted for rows in batches), "dynamic sampling collects more than one batch"
    for loop in (by_hand, by_torchrl):
        found, moved = loop(tmp_path / loop.__name__, batches, wanted)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(shares), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-6)
