"""Multi-turn reinforcement learning of language models as TorchRL components.

A turn is an environment step. Text environments are :class:`~torchrl.envs.EnvBase`, policies emit
action tokens with ``turn_ids``, and the algorithms are TorchRL loss modules and value estimators.
The rooms:

- :mod:`torchrl_llm.keys`: every TensorDict key of the library.
- :mod:`torchrl_llm.envs`: text worlds -> TensorDict.
- :mod:`torchrl_llm.modules`: what computes with a language model.
- :mod:`torchrl_llm.data`: turns -> rows, token-budget micro-batches.
- :mod:`torchrl_llm.functional`: the maths.
- :mod:`torchrl_llm.objectives`: value estimators and losses.
- :mod:`torchrl_llm.collectors`: on-policy batches of whole conversations.
- :mod:`torchrl_llm.trainers`: the training loop, written out.
- :mod:`torchrl_llm.runs`: settings -> a run with a folder, checkpoints and trackers.

Importing this package never imports vLLM, Ray or Weights & Biases.
"""

__version__ = "0.2.1"
