"""Actor, critic and reference on one base model: :func:`load_actor_critic`, and their files.

With LoRA they are adapters on one frozen base, without it copies. How adapters are switched stands in
:mod:`torchrl_llm.modules.adapters`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import load_peft_weights
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_llm.modules.adapters import AdapterError, enable_gradient_checkpointing
from torchrl_llm.modules.critic import TurnCritic
from torchrl_llm.modules.lm import backbone, causal_lm, check_head, check_vocabulary, end_ids
from torchrl_llm.modules.policy import SamplingConfig
from torchrl_llm.modules.scorer import TokenScorer

_VALUE_HEAD = "value_head.safetensors"


class LoraTargetError(ValueError):
    """The LoRA settings name modules that the model does not have, or break what adapters are used for here."""


@dataclass(kw_only=True)
class ActorCritic:
    """What :func:`load_actor_critic` makes: everything that computes with the model in one training run.

    Attributes:
        model: what a policy generates with, under :attr:`adapter`.
        adapter: ``"actor"`` with LoRA, ``None`` without.
        actor: scores the policy being trained.
        critic: values of states, or ``None``.
        reference: scores the model as it was before training, without a graph; writes ``"log_prob"`` too, which the
            caller renames; or ``None``.
    """

    model: PreTrainedModel | PeftModel
    adapter: str | None
    actor: TokenScorer
    critic: TurnCritic | None
    reference: TokenScorer | None

    def actor_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the actor."""
        return _trainable(self.model, self.adapter)

    def critic_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the critic, value head included; empty without a critic."""
        if self.critic is None:
            return []
        return _trainable(self.critic.model, self.critic.adapter) + list(self.critic.value_head.parameters())

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``<path>/actor`` and ``<path>/critic``, in the formats of PEFT or transformers.

        With LoRA these are adapters: ``PeftModel.from_pretrained(base, f"{path}/actor")`` loads one, with no code of
        this library. Without, they are whole models. The critic's head is ``critic/value_head.safetensors``.
        """
        path = Path(path)
        critic_model: Any = None if self.critic is None else self.critic.model
        if self.adapter is not None:
            names = [self.adapter] if self.critic is None else [self.adapter, self.critic.adapter]
            self.model.save_pretrained(str(path), selected_adapters=names)
        else:
            self.model.save_pretrained(path / "actor")
            if critic_model is not None:
                critic_model.save_pretrained(path / "critic")
        if self.critic is not None:
            head = {name: value.contiguous() for name, value in self.critic.value_head.state_dict().items()}
            save_file(head, path / "critic" / _VALUE_HEAD)

    def load_pretrained(self, path: str | Path) -> None:
        """Read the weights that :meth:`save_pretrained` wrote into this object's models.

        Raises:
            AdapterError: the adapters there have other layers or another rank than the ones here.
        """
        path = Path(path)
        _load_weights(self.model, self.adapter, path / "actor")
        if self.critic is not None:
            _load_weights(self.critic.model, self.critic.adapter, path / "critic")
            self.critic.value_head.load_state_dict(load_file(path / "critic" / _VALUE_HEAD))


def load_actor_critic(
    model: str | Path | nn.Module,
    *,
    lora: LoraConfig | None = None,
    critic: bool = False,
    reference: bool = False,
    tokenizer: Any = None,
    sampling: SamplingConfig | None = None,
    stop_ids: Sequence[int] | None = None,
    entropy: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    seed: int = 0,
) -> ActorCritic:
    """Actor, critic and reference on one base model.

    With LoRA the three share the frozen base: adapters ``actor`` and ``critic`` in float32, and the base with adapters
    off as the reference, at no cost in memory. Without, all weights train; critic and reference are copies.

    All dropout is switched off: the log-probs of a row must be the same whenever they are compared.

    Args:
        model: a directory or hub id in transformers format, or a causal language model. A model is used, not copied.
        lora: the LoRA settings of both adapters; ``None``: full fine-tuning.
        critic: make a critic.
        reference: make a reference.
        tokenizer: checked against the model's vocabulary if given.
        sampling: how the policy samples; scores are of the same distribution.
        stop_ids: see :class:`~torchrl_llm.modules.TokenScorer`; default: those of ``sampling``, else the tokenizer's
            end-of-sequence id and the model's end tokens, as a policy's.
        entropy: the actor's scorer writes the entropy as well.
        dtype: of the base weights: a torch dtype, its name, or ``"auto"`` (the checkpoint's, as ``None``).
        device: where to put everything.
        attn_implementation: as in transformers (``"sdpa"``, ``"eager"``, ...); ``None`` takes its default.
        trust_remote_code: run code that comes with the model.
        gradient_checkpointing: recompute activations in ``backward``.
        seed: of the adapters' initialisation; the global random generators are not touched.

    Raises:
        LoraTargetError: the model has no modules of the names in ``lora.target_modules``.
        VocabularyMismatchError: the tokenizer does not belong to the model.
        UnsupportedHeadError: the model changes its logits in a way that the scorer does not know.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_key_value_heads=1))
        >>> models = load_actor_critic(model, lora=LoraConfig(r=2, target_modules=["q_proj"]), critic=True)
        >>> [tuple(p.shape) for p in models.actor_parameters()], len(models.critic_parameters())
        ([(2, 8), (8, 2)], 4)
    """
    base = _load_base(model, dtype, device, attn_implementation, trust_remote_code)
    if tokenizer is not None:
        check_vocabulary(base, tokenizer)
    check_head(base)
    disable_dropout(base)
    sampling = sampling or SamplingConfig()
    if stop_ids is None and sampling.stop_ids is None and tokenizer is not None:
        stop_ids = end_ids(base, tokenizer)
    if lora is None:
        actor_model, adapter, critic_adapter = base, None, None
        frozen = copy.deepcopy(base).requires_grad_(False) if reference else None
        critic_model = copy.deepcopy(backbone(base)) if critic else None
    else:
        adapter, critic_adapter = "actor", "critic"
        actor_model = _add_adapters(base, lora, [adapter, critic_adapter] if critic else [adapter], seed)
        frozen = actor_model if reference else None
        critic_model = actor_model if critic else None
    if gradient_checkpointing:
        enable_gradient_checkpointing(actor_model)
        if critic_model is not None and critic_model is not actor_model:
            enable_gradient_checkpointing(critic_model)
    return ActorCritic(
        model=actor_model,
        adapter=adapter,
        actor=TokenScorer(actor_model, sampling, adapter=adapter, stop_ids=stop_ids, entropy=entropy),
        critic=None if critic_model is None else TurnCritic(critic_model, adapter=critic_adapter),
        reference=None if frozen is None else TokenScorer(frozen, sampling, stop_ids=stop_ids, frozen=True),
    )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability inside ``model`` to 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # transformers' attention layers keep a bare number
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _load_base(
    model: str | Path | nn.Module,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    attn_implementation: str | None,
    trust_remote_code: bool,
) -> Any:
    """A causal language model in evaluation mode, from a path or as given."""
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; expected 'auto' or the name of a torch dtype such as 'bfloat16'.")
    if isinstance(model, str | Path):
        options = {"dtype": dtype or "auto", "trust_remote_code": trust_remote_code}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        lm: Any = AutoModelForCausalLM.from_pretrained(str(model), **options)
    else:
        if isinstance(model, PeftModel):
            raise ValueError(
                "model is a PeftModel already; expected the bare model. Merge and unload its adapter first."
            )
        lm = model
        if attn_implementation is not None:
            lm.set_attn_implementation(attn_implementation)
        if dtype not in (None, "auto"):
            lm.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return lm.to(device).eval() if device is not None else lm.eval()


def _add_adapters(base: nn.Module, lora: LoraConfig, names: Sequence[str], seed: int) -> Any:
    """``base`` as a ``PeftModel`` with one trainable adapter per name, the first one active."""
    _check_lora(base, lora)
    with torch.random.fork_rng(devices=[]):
        # PEFT draws on the CPU and moves the weights afterwards: the CPU generator is all there is to seed.
        torch.default_generator.manual_seed(seed)
        model = get_peft_model(base, copy.deepcopy(lora), adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, copy.deepcopy(lora))
    model.set_requires_grad(list(names), True)
    return model.eval()


def _check_lora(base: nn.Module, lora: LoraConfig) -> None:
    if lora.lora_dropout:
        raise LoraTargetError(
            f"lora_dropout is {lora.lora_dropout}; expected 0: with dropout, the log-probs of one row differ from one "
            "forward to the next, and ratios of them are noise."
        )
    if lora.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise LoraTargetError(
            f"init_lora_weights is {lora.init_lora_weights!r}; expected True, False, 'gaussian' or 'orthogonal': other "
            "initialisations change the base weights, which are the reference model here."
        )
    targets = lora.target_modules
    if targets is None or targets == "all-linear":
        return
    names = [name for name, _ in base.named_modules()]
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name in names) else [targets]
    else:
        missing = [t for t in sorted(targets) if not any(name == t or name.endswith(f".{t}") for name in names)]
    if missing:
        linear = sorted({n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, nn.Linear)})
        raise LoraTargetError(
            f"LoRA targets {missing} match no module of {type(base).__name__}. Its linear modules are {linear}; name "
            'some of them in target_modules, or pass "all-linear".'
        )


def _trainable(model: nn.Module, adapter: str | None) -> list[nn.Parameter]:
    """The parameters of ``model`` that require grad; with an adapter, its own only."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (adapter is None or adapter in name.split("."))
    ]


def _load_weights(model: Any, adapter: str | None, path: Path) -> None:
    """Read an adapter, or without one the whole model, from ``path`` into ``model``."""
    if adapter is None:
        model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype).state_dict())
        return
    weights = load_peft_weights(str(path), device=str(causal_lm(model).device))
    own = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    ours, theirs = ({name: tuple(value.shape) for name, value in each.items()} for each in (own, weights))
    if wrong := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise AdapterError(
            f"The adapter in {path} does not fit the adapter {adapter!r}: for example {wrong[0]} has shape "
            f"{theirs.get(wrong[0])} there and {ours.get(wrong[0])} here. Use the LoRA settings in its "
            "adapter_config.json."
        )
    set_peft_model_state_dict(model, weights, adapter_name=adapter)
