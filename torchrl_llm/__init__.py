"""Multi-turn reinforcement learning of language models as TorchRL components.

A turn is an environment step. Text environments are :class:`~torchrl.envs.EnvBase`, policies emit
action tokens with ``turn_ids``, and the algorithms are TorchRL loss modules and value estimators.
The nouns, in the order in which a batch meets them:

- *key*: a name in a TensorDict; all of them are in :mod:`torchrl_llm.keys`.
- *environment*: :class:`~torchrl_llm.envs.TextEnv` is what you write, text in and text out;
  :class:`~torchrl_llm.envs.GEMEnv` steps N of them as one TorchRL environment, in token ids,
  *slot* by slot. One-turn data sets are :class:`~torchrl_llm.envs.PromptDatasetEnv`.
- *task*: what an episode is about. :class:`~torchrl_llm.envs.TaskSampler` gives every slot the
  next one; episodes of one task are a *group*.
- *formatter*: :class:`~torchrl_llm.envs.ChatFormatter` writes messages as the chat template does,
  and never writes again what was sampled.
- *policy*: :class:`~torchrl_llm.modules.TurnPolicy` samples a response a turn, with
  :class:`~torchrl_llm.modules.HFPolicy` or :class:`~torchrl_llm.modules.VLLMPolicy` as its engine.
- *episode*: :class:`~torchrl_llm.episode.Episode`, the turns from a task to its end.
- *collector*: :class:`~torchrl_llm.collectors.EpisodeCollector` plays whole groups;
  :class:`~torchrl_llm.collectors.TurnCollector` in this process,
  :class:`~torchrl_llm.collectors.AsyncTurnCollector` without a barrier between turns,
  :class:`~torchrl_llm.collectors.RayTurnCollector` on workers.
- *row*: one episode as the losses read it. :class:`~torchrl_llm.data.TurnsToSequence` makes rows
  ``[B]`` of turns ``[N, T]``, as the transform of a replay buffer.
- *scorer* and *critic*: :class:`~torchrl_llm.modules.TokenScorer` writes the log-prob of every
  action token in one forward, :class:`~torchrl_llm.modules.TurnCritic` the value before it.
  :func:`~torchrl_llm.modules.load_actor_critic` makes both, and the *reference*, on one base model.
- *estimator*: :class:`~torchrl_llm.objectives.TurnEstimator` writes the *credit* of each turn:
  :class:`~torchrl_llm.objectives.TurnGAE`, :class:`~torchrl_llm.objectives.ReBN`,
  :class:`~torchrl_llm.objectives.GroupRelative` and others.
- *loss*: :class:`~torchrl_llm.objectives.TurnLoss`, with the defaults of an algorithm as
  :class:`~torchrl_llm.objectives.LLMPPOLoss`, :class:`~torchrl_llm.objectives.LLMReinforceLoss` and
  :class:`~torchrl_llm.objectives.LLMGRPOLoss`. The maths is in :mod:`torchrl_llm.functional`.
- *update*: :class:`~torchrl_llm.trainers.Credit` scores and credits rows,
  :class:`~torchrl_llm.trainers.Update` takes the optimizer steps,
  :class:`~torchrl_llm.trainers.TrustRegion` bounds how far they lead.
- *weight sync*: :class:`~torchrl_llm.weight_update.WeightSync` brings new weights to engines that
  have their own.
- *trainer*: :class:`~torchrl_llm.trainers.LLMTrainer` is the loop over all of these;
  :class:`~torchrl_llm.trainers.Callback` watches it.
- *run*: :func:`~torchrl_llm.runs.build_run` makes a trainer of a
  :class:`~torchrl_llm.runs.RunSettings`, with a folder, checkpoints, trackers and a report.

Importing this package never imports vLLM, Ray or Weights & Biases.
"""

__version__ = "0.2.1"
