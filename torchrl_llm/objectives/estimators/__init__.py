"""Turn-level credit as TorchRL value estimators, which :mod:`torchrl_llm.objectives` names."""
