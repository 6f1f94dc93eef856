"""Actor, critic and reference on one base model: :func:`load_actor_critic`, and their files.

With LoRA they are adapters on one frozen base, without it copies.
:mod:`torchrl_llm.modules.adapters` switches adapters, :mod:`torchrl_llm.modules.weights` reads and
writes files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from torchrl_llm.modules import weights
from torchrl_llm.modules._base import Quantization, compile_layers, load_base, unmap_weights
from torchrl_llm.modules.adapters import AdapterError, add_adapters, enable_gradient_checkpointing, trainable_parameters
from torchrl_llm.modules.base_products import has_narrow_base_products, narrow_base_products
from torchrl_llm.modules.checks import check_head, check_repeatable, check_rows, check_vocabulary
from torchrl_llm.modules.critic import TurnCritic
from torchrl_llm.modules.lm import backbone, causal_lm, generation_end_ids, vocabulary_of
from torchrl_llm.modules.merging import merged_tensors
from torchrl_llm.modules.prefix_attention import enable_prefix_sharing
from torchrl_llm.modules.sampling import SamplingConfig, decide_stop_ids
from torchrl_llm.modules.scorer import TokenScorer
from torchrl_llm.utils.files import open_to_others

_VALUE_HEAD = "value_head.safetensors"


@dataclass(kw_only=True)
class ActorCritic:
    """The models of one training run, as :func:`load_actor_critic` loads them.

    Attributes:
        model: the model that a policy generates with, under :attr:`adapter`.
        adapter: ``"actor"`` with LoRA, ``None`` without.
        actor: computes log-probs under the policy being trained.
        critic: computes values of states; or ``None``.
        joint: of a shared critic: what ``actor`` and ``critic`` write at action tokens, from one
            forward, for ``LLMPPOLoss(models.actor, models.critic, joint=models.joint)``; or
            ``None``.
        reference: computes log-probs under the policy that the KL is taken to, without a graph;
            writes ``"log_prob"`` too, which the caller renames; or ``None``.
    """

    model: PreTrainedModel | PeftModel
    adapter: str | None
    actor: TokenScorer
    critic: TurnCritic | None
    joint: TokenScorer | None
    reference: TokenScorer | None

    def actor_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the actor."""
        return trainable_parameters(self.model, self.adapter)

    def critic_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the critic, value head included; empty without a critic.

        Of a shared critic they are the head's alone: the trunk is among :meth:`actor_parameters`.
        """
        if self.critic is None:
            return []
        trunk = trainable_parameters(self.critic.model, self.critic.adapter) if "critic" in self._trunks() else []
        return trunk + list(self.critic.value_head.parameters())

    def base_parameters(self) -> list[nn.Parameter]:
        """The frozen parameters that belong to no adapter: the base under LoRA, the reference's
        copy without."""
        models: list[Any] = [self.model, *(part.model for part in (self.critic, self.reference) if part is not None)]
        found = [
            parameter
            for model in models
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and not set(name.split(".")) & set(getattr(model, "peft_config", ()))
        ]
        return list(dict.fromkeys(found))

    @contextmanager
    def offload_base(self) -> Iterator[None]:
        """``with models.offload_base():`` keeps :meth:`base_parameters` in the host's memory,
        pinned for CUDA.

        Adapters and heads stay where they are, so they can be sent to an engine meanwhile. For
        rollouts by a policy that has its own copy of the model; no forward here can run inside. On
        a CPU it does nothing. The ``nn.Parameter`` objects stay, so modules, optimizers and tied
        weights that refer to them remain valid.

        Examples:
            >>> from torchrl_llm.testing.tiny import tiny_model_path
            >>> models = load_actor_critic(tiny_model_path(), lora=LoraConfig(r=2, target_modules=["q_proj"]))
            >>> with models.offload_base():
            ...     {p.device.type for p in models.base_parameters()}
            {'cpu'}
        """
        moved = [(each, each.device) for each in self.base_parameters() if each.device.type != "cpu"]
        try:
            for parameter, _ in moved:
                host = torch.empty_like(parameter.data, device="cpu", pin_memory=parameter.is_cuda)
                parameter.data = host.copy_(parameter.data)
            torch.cuda.empty_cache()  # else the memory would stay with this process's allocator
            yield
        finally:
            for parameter, device in moved:
                parameter.data = parameter.data.to(device)

    def refresh_reference(self) -> None:
        """Copy the actor's weights into the reference.

        Raises:
            AdapterError: there is no reference, or it is the base with adapters off.
        """
        self._check_reference("refresh_reference()")
        if self.adapter is not None:
            model: Any = self.model
            weights.set_adapter_tensors(model, "reference", weights.adapter_of(model, self.adapter).tensors)
        else:
            self._trunks()["reference"].load_state_dict(self.model.state_dict())

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``<path>/actor``, ``<path>/critic`` and ``<path>/reference``, in the formats of
        PEFT or transformers.

        With LoRA these are adapters: ``PeftModel.from_pretrained(base, f"{path}/actor")`` loads
        one, with no code of this library. Without, they are whole models. The critic's head is
        ``critic/value_head.safetensors``; of a shared critic it is all there is. A reference that
        is the base with adapters off is not written.
        """
        path = Path(path)
        for role, model in self._trunks().items():
            if self.adapter is None:
                model.save_pretrained(path / role)
            else:  # PEFT puts the adapter into a folder of its name
                # save_embedding_layers="auto", the default, may ask the hub for the configuration
                # of the base.
                model.save_pretrained(str(path), selected_adapters=[role], save_embedding_layers=False)
            open_to_others(path / role)
        if self.critic is not None:
            (path / "critic").mkdir(parents=True, exist_ok=True)
            save_file(self.critic.value_head.state_dict(), path / "critic" / _VALUE_HEAD)
            open_to_others(path / "critic")

    def export_merged(self, path: str | Path, tokenizer: Any = None) -> None:
        """Write the actor as one whole model that transformers and vLLM load, its adapter merged
        into the weights.

        The merge is made on a copy in the host's memory, in the dtype of the base; the models here
        stay as they are.

        Args:
            path: a folder of its own.
            tokenizer: written beside the weights if given.

        Raises:
            WeightsError: the base is quantized, or the adapter changes tied embeddings.
        """
        merged = None
        if self.adapter is not None:
            merged = {name: tensor.cpu() for name, tensor in merged_tensors(self.model, self.adapter)}
        causal_lm(self.model).save_pretrained(path, state_dict=merged)
        open_to_others(Path(path))
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    def load_pretrained(
        self,
        path: str | Path,
        *,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool = False,
        merge_lora_configs: bool = False,
    ) -> None:
        """Read what :meth:`save_pretrained` wrote into this object's models. Only safetensors files
        are read.

        The actor is always read. Critic and reference are read where both sides have one, and stay
        as they are otherwise; a reference that is the base with adapters off is never changed. The
        two ``overwrite_`` arguments concern whole models too, where there are no adapters.

        Call it before the optimizer is made: with ``merge_lora_configs`` the parameters may be
        other tensors afterwards. A policy that has generated already is told by
        ``policy.weights_changed()``.

        Args:
            path: the folder.
            overwrite_reference_adapter: the reference becomes the checkpoint's actor, from which
                training continues (from supervised fine-tuning to reinforcement learning, and from
                one run to the next).
            overwrite_critic_adapter: the critic's trunk becomes the checkpoint's actor; its value
                head stays. For a checkpoint without a critic.
            merge_lora_configs: accept LoRA settings other than those here. Every adapter gets the
                larger rank and the union of the target modules, ``lora_alpha`` keeps the scaling of
                the settings here, and factors are padded and rescaled, so that each adapter
                computes what it did.

        Raises:
            WeightsError: files are missing, damaged, or of another model.
            AdapterError: the LoRA settings differ and ``merge_lora_configs`` is false, or they
                cannot be merged; or there is no critic or reference to overwrite.

        Examples:
            A small adapter becomes the start, and the reference, of a run with a larger one:

            >>> from tempfile import mkdtemp
            >>> from torchrl_llm.testing.tiny import tiny_model_path
            >>> folder, base = mkdtemp(), tiny_model_path()
            >>> small = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"])
            >>> load_actor_critic(base, lora=small).save_pretrained(folder)
            >>> large = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"])
            >>> models = load_actor_critic(base, lora=large, reference="adapter")
            >>> models.load_pretrained(folder, overwrite_reference_adapter=True)
            Traceback (most recent call last):
                ...
            torchrl_llm.modules.adapters.AdapterError: The LoRA settings of ... are not those of the model here:
              lora_alpha: 4 there, 8 here
              r: 2 there, 4 here
              target_modules: ['q_proj'] there, ['v_proj'] here
            Use the settings of its adapter_config.json, or pass merge_lora_configs=True.
            >>> models.load_pretrained(folder, overwrite_reference_adapter=True, merge_lora_configs=True)
            >>> models.model.peft_config["actor"].r, len(models.actor_parameters())
            (4, 8)
        """
        path, trunks = Path(path), self._trunks()
        if overwrite_reference_adapter:
            self._check_reference("overwrite_reference_adapter=True")
        if overwrite_critic_adapter and self.critic is None:
            raise AdapterError(
                "overwrite_critic_adapter=True, but there is no critic. Load the models with critic=True."
            )
        sources = {"actor": path / "actor"}
        if "reference" in trunks and (overwrite_reference_adapter or weights.has_weights(path / "reference")):
            sources["reference"] = path / ("actor" if overwrite_reference_adapter else "reference")
        head = None
        if overwrite_critic_adapter:
            sources["critic"] = path / "actor"
        elif self.critic is not None and (path / "critic").is_dir():
            own_trunk = weights.has_weights(path / "critic")
            if own_trunk and "critic" not in trunks:
                raise weights.WeightsError(
                    f"{path / 'critic'} has a trunk of its own, but the critic here shares the actor's. Load the models "
                    "with critic=True."
                )
            file = path / "critic" / _VALUE_HEAD
            head, own_head = weights.read_tensors(file), self.critic.value_head.state_dict()
            weights.check_shapes(head, own_head, f"{file} is the head of another model", weights.WeightsError)
            sources["critic"] = path / ("critic" if own_trunk else "actor")
        sources = {role: folder for role, folder in sources.items() if role in trunks}
        if self.adapter is None:
            # All are read before the first is changed: an error leaves the models as they are.
            read = {role: weights.read_model(folder, trunks[role]) for role, folder in sources.items()}
            for role, tensors in read.items():
                trunks[role].load_state_dict(tensors)
        else:
            model: Any = self.model
            weights.load_adapters(model, sources, merge=merge_lora_configs)
            if has_narrow_base_products(model):
                narrow_base_products(model)  # merged settings may have other layers
        if head is not None and self.critic is not None:
            self.critic.value_head.load_state_dict(head)

    def _trunks(self) -> dict[str, Any]:
        """Role -> model, for roles that have weights of their own; with LoRA the role is the
        adapter's name."""
        trunks: dict[str, Any] = {"actor": self.model}
        for role, part in (("critic", self.critic), ("reference", self.reference)):
            if part is not None and (part.model is not self.model or part.adapter == role):
                trunks[role] = part.model
        return trunks

    def _check_reference(self, what: str) -> None:
        if "reference" not in self._trunks():
            state = "there is no reference" if self.reference is None else "it is the base model with adapters off"
            needed = "True" if self.adapter is None else '"adapter"'
            raise AdapterError(
                f"{what} needs a reference with weights of its own, but {state}. Load the models with "
                f"reference={needed}."
            )


def load_actor_critic(
    model: str | Path | nn.Module,
    *,
    lora: LoraConfig | None = None,
    critic: bool | Literal["shared"] = False,
    reference: bool | Literal["adapter"] = False,
    tokenizer: Any = None,
    sampling: SamplingConfig | None = None,
    entropy: bool = False,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    base_products: Literal["bfloat16"] | None = None,
    master_weights: bool = True,
    gradient_checkpointing: bool = False,
    compile: bool = False,
    share_prefixes: bool = True,
    chunk_logits: int | None = None,
    seed: int = 0,
) -> ActorCritic:
    """Actor, critic and reference on one base model.

    With LoRA they share the frozen base: adapters ``actor`` and ``critic`` in float32, and as the
    reference the base with adapters off, at no cost in memory, or a third adapter. Without, all
    weights train, in float32; critic and reference are copies. Log-probs and values are float32
    whatever the base is (float64 for a float64 model).

    Dropout, layer drop and jitter are switched off, in the model and in its configuration: the
    log-probs of a row must be the same whenever they are compared.

    Args:
        model: a directory or hub id in transformers format, or a causal language model. A model is
            used, not copied.
        lora: the LoRA settings of the adapters; ``None``: full fine-tuning. Of a multimodal model
            only the language model gets adapters, whatever the names in ``target_modules`` match
            elsewhere.
        critic: make a critic. ``"shared"``: it is a value head on the actor's own trunk, into which
            the gradients of both losses flow; one forward serves both (:attr:`ActorCritic.joint`).
        reference: make a reference of the model as it is now. With LoRA it is the base with
            adapters off, and stays so; ``"adapter"``: a frozen adapter ``reference`` that starts as
            a copy of the actor's, and can be overwritten by :meth:`ActorCritic.refresh_reference`
            and :meth:`ActorCritic.load_pretrained`. A copy without LoRA can be overwritten too.
        tokenizer: checked against the model's vocabulary if given.
        sampling: how the policy samples; scores are of the same distribution. Where
            ``min_output_tokens`` needs stop ids that it does not give, they are decided as a
            policy's (``decide_stop_ids`` of ``modules.sampling``).
        entropy: the actor's scorer writes the entropy as well.
        dtype: of the base weights: a torch dtype, its name, or ``"auto"`` (the checkpoint's, as
            ``None``).
        device: where to put everything.
        attn_implementation: as in transformers; ``None`` takes its default, as a rule ``"sdpa"``,
            which runs flash attention on a GPU where no mask is needed. With any other, rows share
            nothing; ``HFPolicy`` takes ``"sdpa"`` and ``"eager"``.
        trust_remote_code: run code that comes with the model.
        quantization: ``"nf4"`` keeps the linear layers of the base in 4 bits (QLoRA,
            https://arxiv.org/abs/2305.14314) and computes in ``dtype`` (default bfloat16). Needs
            ``lora``, a path, and bitsandbytes.
        base_products: "bfloat16" multiplies by the frozen weights of LoRA layers in bfloat16 and
            all else in float32 (:func:`~torchrl_llm.modules.base_products.narrow_base_products`):
            faster on CPUs that have the instructions; gradients are off by some percent. Needs
            ``lora`` on a float32 base. Default ``None``: all in float32.
        master_weights: without LoRA, keep weights that are narrower than float32 in float32,
            whatever ``dtype`` says, and log what that costs: bfloat16 rounds most of an optimizer's
            steps away. ``torch.autocast`` around forwards still computes in half precision.
            ``False`` is for models that are not trained, and for optimizers with float32 copies of
            their own. Default True.
        gradient_checkpointing: recompute activations in ``backward``.
        compile: ``torch.compile`` the layers for scorers and critic; generation is not compiled.
            Each adapter is a graph of its own, compiled when it is first used. Not together with
            ``gradient_checkpointing``.
        share_prefixes: compute what the rows of a batch share once, for models that support it
            (``enable_prefix_sharing``). Changes results by rounding only. Not with ``compile``.
            Default True.
        chunk_logits: most logits that a scorer makes at a time; ``None``: 2**27 on CUDA, elsewhere
            2**24.
        seed: of the adapters' initialization; the global random generators stay as they are.

    Raises:
        LoraTargetError: the model has no modules of the names in ``lora.target_modules``, or
            ``lora`` asks for what adapters cannot have here (dropout, biases, another
            initialization of the base).
        VocabularyMismatchError: the tokenizer does not belong to the model.
        RandomForwardError: with ``gradient_checkpointing``, the model computes something else in
            training mode.
        UnsupportedHeadError: the model changes its logits in a way that the scorer does not know.
        UnsupportedModelError: the model is not causal, or its forward fails on a batch of token
            ids.
        ImportError: ``quantization`` without bitsandbytes.

    Examples:
        >>> from transformers import Qwen2Config, Qwen2ForCausalLM
        >>> model = Qwen2ForCausalLM(Qwen2Config(
        ...     vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...     num_key_value_heads=1))
        >>> models = load_actor_critic(model, lora=LoraConfig(r=2, target_modules=["q_proj"]), critic=True)
        >>> [tuple(p.shape) for p in models.actor_parameters()], len(models.critic_parameters())
        ([(2, 8), (8, 2)], 4)
    """
    how = {"gradient_checkpointing": gradient_checkpointing, "compile": compile}
    _check_options(lora, critic, reference, quantization, base_products, **how)
    base = load_base(
        model,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        master_weights=master_weights and lora is None,
    )
    if tokenizer is not None:
        check_vocabulary(base, tokenizer)
    check_head(base)
    check_rows(base)
    # Compiled layers would be traced again for every layout of prefixes.
    sharing = enable_prefix_sharing(base) if share_prefixes and not compile else None
    sampling = sampling or SamplingConfig()
    if sampling.min_output_tokens and sampling.stop_ids is None and tokenizer is not None:
        sampling = decide_stop_ids(sampling, generation_end_ids(base), tokenizer, vocabulary=vocabulary_of(base))
    roles = ["actor", *(["critic"] if critic is True else []), *(["reference"] if reference == "adapter" else [])]
    if lora is None:
        unmap_weights(base)
        actor_model, adapter = base, None
        critic_model = copy.deepcopy(backbone(base)) if critic is True else base
        frozen = copy.deepcopy(base).requires_grad_(False) if reference else base
    else:
        adapter = "actor"
        actor_model = critic_model = frozen = add_adapters(base, lora, roles, seed=seed)
        if base_products is not None:
            narrow_base_products(actor_model)
    if gradient_checkpointing:
        for each in dict.fromkeys((actor_model, critic_model)):
            enable_gradient_checkpointing(each)
            check_repeatable(each)
    if compile:
        for each in dict.fromkeys((actor_model, critic_model, frozen)):
            compile_layers(backbone(each))
    critic_adapter = "critic" if lora is not None and critic is True else adapter
    reference_adapter = "reference" if reference == "adapter" else None
    scorer = partial(TokenScorer, sampling=sampling, prefixes=sharing, chunk_logits=chunk_logits)
    score = partial(scorer, actor_model, adapter=adapter, entropy=entropy)
    values = TurnCritic(critic_model, adapter=critic_adapter, prefixes=sharing) if critic else None
    models = ActorCritic(
        model=actor_model,
        adapter=adapter,
        actor=score(),
        critic=values,
        joint=score(value_head=values.value_head) if values is not None and critic == "shared" else None,
        reference=scorer(frozen, adapter=reference_adapter, frozen=True) if reference else None,
    )
    if reference == "adapter":
        # PEFT has drawn other factors for it; with init_lora_weights=False it is not even the same
        # function.
        models.refresh_reference()
    return models


def _check_options(
    lora: LoraConfig | None, critic: Any, reference: Any, quantization: Any, base_products: Any, **how: bool
) -> None:
    for name, value, special in (("critic", critic, "shared"), ("reference", reference, "adapter")):
        if value not in (False, True, special):
            raise ValueError(f"{name} is {value!r}; expected False, True or {special!r}.")
    if lora is None and reference == "adapter":
        raise ValueError("reference='adapter' needs lora=LoraConfig(...); without LoRA, reference=True is a copy.")
    if lora is None and quantization is not None:
        raise ValueError(
            f"quantization is {quantization!r}, but full fine-tuning would train the weights that it rounds to 4 bits. "
            "Pass lora=LoraConfig(...), or quantization=None."
        )
    if base_products is not None and (lora is None or how["compile"] or base_products != "bfloat16"):
        raise ValueError(
            f"base_products is {base_products!r}; expected 'bfloat16', with lora=LoraConfig(...) and without compile, or None."
        )
    if all(how.values()):
        raise ValueError(
            "compile=True together with gradient_checkpointing=True: torch.compile does not carry the adapter of a "
            "forward into its recomputation. Choose one; a compiled graph recomputes cheap operations by itself."
        )
