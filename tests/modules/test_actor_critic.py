"""load_actor_critic, its parts and its files, on random tiny Qwen2 models."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from places import device
from tensordict import TensorDict
from tiny_actor_critic import LORA, make_model, make_rows, outputs, perturb
from transformers import AutoModelForCausalLM

from torchrl_llm.modules import (
    AdapterError,
    HFPolicy,
    LoraTargetError,
    SamplingConfig,
    TokenScorer,
    VocabularyMismatchError,
    load_actor_critic,
    use_adapter,
)
from torchrl_llm.modules._base import compile_layers
from torchrl_llm.modules.lm import backbone
from torchrl_llm.objectives import LLMPPOLoss
from torchrl_llm.testing.tiny import tiny_model_path
from torchrl_llm.testing.tokenizers import byte_tokenizer


@pytest.fixture(params=["lora", "full"])
def lora(request) -> LoraConfig | None:
    return LoraConfig(**LORA) if request.param == "lora" else None


class TestLoadActorCritic:
    def test_a_lora_run_gives_no_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_actor_critic(make_model(), lora=LoraConfig(**LORA), critic=True, gradient_checkpointing=True)

    def test_reference_is_the_base_exactly_and_stays_it(self, lora):
        expected = TokenScorer(make_model())(make_rows())["log_prob"].detach()
        models = load_actor_critic(make_model(), lora=lora, critic=True, reference=True)
        # LoRA starts at zero
        assert torch.equal(models.actor(make_rows())["log_prob"].detach(), expected)
        perturb(models)
        assert not torch.allclose(models.actor(make_rows())["log_prob"], expected)
        reference = models.reference(make_rows())["log_prob"]
        assert torch.equal(reference, expected)
        assert not reference.requires_grad

    def test_actor_and_critic_have_their_own_gradients_in_one_graph(self, lora):
        models = load_actor_critic(make_model(), lora=lora, critic=True, reference=True)
        perturb(models)
        actor, critic = models.actor_parameters(), models.critic_parameters()
        assert not {id(p) for p in actor} & {id(p) for p in critic}

        def gradients(use_actor, use_critic):
            total = 0.0
            if use_actor:
                total = total + models.actor(make_rows())["log_prob"].sum()
            models.reference(make_rows())
            if use_critic:
                td = models.critic(make_rows())
                total = total + td["state_value"].sum() + td["bootstrap_value"].sum()
            total.backward()
            found = [p.grad for p in actor + critic]
            for p in actor + critic:
                p.grad = None
            return found

        both, only_actor, only_critic = gradients(True, True), gradients(True, False), gradients(False, True)
        for i, grad in enumerate(both):
            mine, other = (only_actor, only_critic) if i < len(actor) else (only_critic, only_actor)
            assert other[i] is None
            assert grad.abs().max() > 0
            assert torch.equal(grad, mine[i])

    def test_weights_that_train_do_not_depend_on_the_file_they_came_from(self, tmp_path):
        """safetensors maps it into memory: writing over it in place took trained weights back to
        the file's."""
        for file in Path(tiny_model_path()).iterdir():
            shutil.copy(file, tmp_path)
        models = load_actor_critic(tmp_path, critic=True, reference=True)
        before = [parameter.detach().clone() for parameter in models.model.parameters()]
        with torch.no_grad():
            for parameter in models.model.parameters():
                parameter.add_(1.0)
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(bytes(len(weights.read_bytes())))
        for parameter, start in zip(models.model.parameters(), before, strict=True):
            assert torch.equal(parameter, start + 1.0)

    def test_only_what_trains_requires_grad(self):
        models = load_actor_critic(make_model(), lora=LoraConfig(**LORA), critic=True)
        trainable = {name for name, p in models.model.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in trainable)
        assert len(trainable) == 2 * 2 * 2 * 2  # layers, modules, A and B, actor and critic
        assert len(models.actor_parameters()) == 8
        assert len(models.critic_parameters()) == 8 + 2
        assert load_actor_critic(make_model(), lora=LoraConfig(**LORA)).critic_parameters() == []

    def test_without_lora_nothing_is_shared(self):
        base = make_model()
        models = load_actor_critic(base, critic=True, reference=True)
        assert models.model is base
        assert models.adapter is None
        groups = [base, models.critic.model, models.reference.model]
        places = [{p.data_ptr() for p in group.parameters()} for group in groups]
        assert not places[0] & places[1] | places[0] & places[2] | places[1] & places[2]
        assert not hasattr(models.critic.model, "lm_head")
        assert load_actor_critic(make_model()).reference is None

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_adapters_heads_and_outputs_are_float32_on_any_base(self, dtype):
        options = {"critic": True, "reference": "adapter", "entropy": True}
        models = load_actor_critic(make_model(), lora=LoraConfig(**LORA), dtype=dtype, **options)
        parameters = dict(models.model.named_parameters())
        assert {p.dtype for name, p in parameters.items() if "lora_" in name} == {torch.float32}
        assert {p.dtype for p in models.critic_parameters()} == {torch.float32}
        assert {p.dtype for p in models.base_parameters()} == {getattr(torch, dtype)}
        perturb(models)
        rows = models.critic(models.actor(make_rows()))
        found = [rows[key] for key in ("log_prob", "entropy", "state_value", "bootstrap_value")]
        found.append(models.reference(make_rows())["log_prob"])
        assert {x.dtype for x in found} == {torch.float32}
        exact = load_actor_critic(make_model(), lora=LoraConfig(**LORA), **options)
        perturb(exact)
        torch.testing.assert_close(found[0], exact.actor(make_rows())["log_prob"], rtol=0, atol=5e-2)
        sum(x.sum() for x in found).backward()
        for parameter in models.actor_parameters() + models.critic_parameters():
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.abs().max() > 0

    def test_full_fine_tuning_of_a_bfloat16_model_scores_in_float32(self):
        models = load_actor_critic(make_model(), critic=True, dtype="bfloat16")
        assert {x.dtype for x in outputs(models)} == {torch.float32}
        assert {p.dtype for p in models.critic.value_head.parameters()} == {torch.float32}

    def test_reference_adapter_is_a_frozen_copy_of_the_actor(self):
        lora = LoraConfig(**LORA, init_lora_weights=False)
        models = load_actor_critic(make_model(), lora=lora, critic=True, reference="adapter")
        start = models.actor(make_rows())["log_prob"].detach()
        assert not torch.allclose(start, TokenScorer(make_model())(make_rows())["log_prob"])
        assert torch.equal(models.reference(make_rows())["log_prob"], start)
        trained = {id(p) for p in models.actor_parameters() + models.critic_parameters()}
        frozen = [p for name, p in models.model.named_parameters() if ".reference." in name]
        assert len(frozen) == 8
        assert not any(p.requires_grad or id(p) in trained for p in frozen)
        perturb(models)
        assert not torch.allclose(models.actor(make_rows())["log_prob"], start)
        assert torch.equal(models.reference(make_rows())["log_prob"], start)

    def test_refresh_reference(self, lora):
        models = load_actor_critic(make_model(), lora=lora, reference="adapter" if lora else True)
        for seed in range(2):
            perturb(models, seed)
            before = models.reference(make_rows())["log_prob"]
            expected = models.actor(make_rows())["log_prob"].detach()
            assert not torch.allclose(before, expected)
            models.refresh_reference()
            assert torch.equal(models.reference(make_rows())["log_prob"], expected)
        actor = {p.data_ptr() for p in models.actor_parameters()}
        perturb(models, 5)  # a copy, not a view
        assert torch.equal(models.reference(make_rows())["log_prob"], expected)
        assert not models.reference(make_rows())["log_prob"].requires_grad
        assert actor == {p.data_ptr() for p in models.actor_parameters()}

    def test_a_reference_that_cannot_be_refreshed(self):
        with pytest.raises(AdapterError, match=r'base model with adapters off.*reference="adapter"'):
            load_actor_critic(make_model(), lora=LoraConfig(**LORA), reference=True).refresh_reference()
        with pytest.raises(AdapterError, match="there is no reference"):
            load_actor_critic(make_model()).refresh_reference()

    def test_shared_critic(self, lora):
        models = load_actor_critic(make_model(), lora=lora, critic="shared")
        perturb(models)
        assert [tuple(p.shape) for p in models.critic_parameters()] == [(1, 32), (1,)]
        trunk, head = models.actor_parameters(), models.critic_parameters()
        assert not {id(p) for p in trunk} & {id(p) for p in head}

        def gradients(*factors):
            td = models.critic(make_rows())
            (factors[0] * models.actor(make_rows())["log_prob"].sum() + factors[1] * td["state_value"].sum()).backward()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trunk]
            models.model.zero_grad()
            return found

        both, of_actor, of_critic = gradients(1, 1), gradients(1, 0), gradients(0, 1)
        for a, b, c in zip(both, of_actor, of_critic, strict=True):
            torch.testing.assert_close(a, b + c, rtol=1e-4, atol=1e-5)
        assert max(g.abs().max() for g in of_critic) > 1e-3
        assert all(p.grad.abs().max() > 0 for p in head)

    @pytest.mark.parametrize("share_prefixes", [False, True])
    def test_values_of_a_shared_trunk_take_no_forward_of_their_own(self, lora, share_prefixes):
        """The losses and every gradient equal the results of two forwards; one is made."""
        model = make_model().double()
        models = load_actor_critic(model, lora=lora, critic="shared", share_prefixes=share_prefixes)
        perturb(models)
        batch = make_rows()
        batch["tokens"][1, :5] = batch["tokens"][0, :5]
        actions = batch["turn_ids"] >= 0
        noise = torch.randn(5, *actions.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
            device()
        )
        names = ("advantage", "sample_log_prob", "old_log_prob", "state_value", "value_target")
        batch.update({name: torch.where(actions, value, 0.0) for name, value in zip(names, noise, strict=True)})
        parameters = models.actor_parameters() + models.critic_parameters()

        def gradients(joint):
            forwards = []
            hook = backbone(models.model).register_forward_hook(lambda *given: forwards.append(1))
            out = LLMPPOLoss(models.actor, models.critic, joint=joint, kl_coeff=0.0)(batch)
            hook.remove()
            found = torch.autograd.grad(out["loss_objective"] + out["loss_critic"], parameters)
            return len(forwards), [out[name] for name in ("loss_objective", "loss_critic")], found

        forwards, losses, found = gradients(models.joint)
        apart, expected, wanted = gradients(None)
        assert (forwards, apart) == (1, 2)
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)  # adapters are float32

    @pytest.mark.parametrize("critic", [True, "shared"])
    def test_the_critic_never_runs_the_lm_head(self, lora, critic):
        models = load_actor_critic(make_model(), lora=lora, critic=critic)
        calls = []
        for model in (models.model, models.critic.model):
            for name, module in model.named_modules():
                if name.endswith("lm_head"):
                    module.register_forward_pre_hook(lambda *_: calls.append(1))
        models.critic(make_rows())
        assert calls == []
        models.actor(make_rows())
        assert calls != []

    def test_initialisation_is_seeded_and_leaves_the_global_generator_alone(self):
        state = torch.get_rng_state()
        first, again, other = (
            load_actor_critic(make_model(), lora=LoraConfig(**LORA), critic=True, seed=seed) for seed in (1, 1, 2)
        )
        assert torch.equal(state, torch.get_rng_state())
        a = [p for p in first.actor_parameters() if p.abs().sum() > 0]
        assert len(a) == 4
        for x, y, z in zip(*(m.actor_parameters() for m in (first, again, other)), strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z) == (not x.any())
        actor, critic = first.actor_parameters()[0], first.critic_parameters()[0]
        assert not torch.equal(actor, critic)

    def test_dropout_is_off(self):
        models = load_actor_critic(make_model(attention_dropout=0.5), critic=True)
        models.model.train()
        assert torch.equal(outputs(models)[0], outputs(models)[0])

    def test_gradient_checkpointing(self, lora):
        gradients = []
        for checkpointing in (False, True):
            models = load_actor_critic(make_model(), lora=lora, critic=True, gradient_checkpointing=checkpointing)
            perturb(models)
            calls = []
            decoders = [models.model.get_decoder()] + ([models.critic.model] if lora is None else [])
            for decoder in decoders:
                decoder.layers[0].self_attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            td = models.critic(make_rows())
            (models.actor(make_rows())["log_prob"].sum() + td["state_value"].square().sum()).backward()
            assert len(calls) == (4 if checkpointing else 2)
            assert not any(
                m.training for m in models.model.modules()
            )  # generation would lose its KV cache in training mode
            gradients.append([p.grad for p in models.actor_parameters() + models.critic_parameters()])
        for plain, recomputed in zip(*gradients, strict=True):
            torch.testing.assert_close(plain, recomputed, rtol=1e-5, atol=1e-6)

    def test_scores_are_of_the_sampled_distribution(self):
        tokenizer = byte_tokenizer()
        sampling = SamplingConfig(temperature=0.7, min_output_tokens=2)
        models = load_actor_critic(make_model(), tokenizer=tokenizer, sampling=sampling, reference=True, entropy=True)
        assert models.actor.held_back == models.reference.held_back == (tokenizer.eos_token_id,)
        assert (
            models.actor.sampling == models.reference.sampling == replace(sampling, stop_ids=(tokenizer.eos_token_id,))
        )
        assert models.actor.out_keys == ["log_prob", "entropy"]
        assert models.reference.out_keys == ["log_prob"]
        with pytest.raises(ValueError, match="stop_ids is None"):
            load_actor_critic(make_model(), sampling=sampling)

    def test_named_errors(self):
        with pytest.raises(LoraTargetError, match=r"\['query'\].*'down_proj', 'gate_proj', 'k_proj', 'lm_head'"):
            load_actor_critic(make_model(), lora=LoraConfig(target_modules=["q_proj", "query"]))
        with pytest.raises(LoraTargetError, match=r"query\.\*"):
            load_actor_critic(make_model(), lora=LoraConfig(target_modules=r"query.*"))
        with pytest.raises(LoraTargetError, match=r"lora_dropout is 0\.1"):
            load_actor_critic(make_model(), lora=LoraConfig(**LORA, lora_dropout=0.1))
        with pytest.raises(LoraTargetError, match="init_lora_weights is 'pissa'"):
            load_actor_critic(make_model(), lora=LoraConfig(**LORA, init_lora_weights="pissa"))
        with pytest.raises(LoraTargetError, match="bias is 'all'"):
            load_actor_critic(make_model(), lora=LoraConfig(**LORA, bias="all"))
        for wrong, match in [
            ({"critic": "both"}, "critic is 'both'; expected False, True or 'shared'"),
            ({"reference": "base"}, "reference is 'base'; expected False, True or 'adapter'"),
            ({"reference": "adapter"}, "reference='adapter' needs lora"),
            ({"compile": True, "gradient_checkpointing": True}, "Choose one"),
        ]:
            with pytest.raises(ValueError, match=match):
                load_actor_critic(make_model(), **wrong)
        with pytest.raises(VocabularyMismatchError):
            load_actor_critic(make_model(vocab_size=100), tokenizer=byte_tokenizer())
        with pytest.raises(ValueError, match="dtype is 'half32'"):
            load_actor_critic(make_model(), dtype="half32")
        adapted = load_actor_critic(make_model(), lora=LoraConfig(**LORA)).model
        with pytest.raises(ValueError, match="PeftModel already"):
            load_actor_critic(adapted)

    def test_all_linear_and_options_of_loading(self, tmp_path):
        make_model().save_pretrained(tmp_path)
        lora = LoraConfig(r=2, target_modules="all-linear")
        models = load_actor_critic(tmp_path, lora=lora, attn_implementation="eager", dtype=torch.float64)
        assert models.model.config._attn_implementation == "eager"
        assert models.model.get_base_model().dtype == torch.float64
        assert len(models.actor_parameters()) == 2 * 7 * 2


class TestCompile:
    @pytest.mark.extra
    def test_same_numbers_under_every_adapter(self):
        def build(compile):
            lora = LoraConfig(r=4, target_modules=["q_proj"])
            models = load_actor_critic(make_model(), lora=lora, critic=True, reference=True, compile=compile)
            perturb(models)
            return models

        def compute(models, rows):
            found = [models.actor(rows.clone())["log_prob"], models.critic(rows.clone())["state_value"]]
            found.append(models.reference(rows.clone())["log_prob"])
            (found[0].sum() + found[1].square().sum()).backward()
            parameters = models.actor_parameters() + models.critic_parameters()
            gradients = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
            return found + gradients

        plain, compiled = build(False), build(True)
        torch._dynamo.utils.counters.clear()
        rows = make_rows()
        for batch in (rows, rows[:2], rows):
            for a, b in zip(compute(compiled, batch), compute(plain, batch), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs >= 3  # actor, critic and the base at least
        # Other lengths and a copy of the model need no new graph, nor does generation.
        short = TensorDict({key: value[:, :9] for key, value in rows.items()}, batch_size=[3])
        for models in (compiled, copy.deepcopy(compiled)):
            for a, b in zip(compute(models, short), compute(plain, short), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        policies = [HFPolicy(m.model, byte_tokenizer(), SamplingConfig(), adapter="actor") for m in (compiled, plain)]
        prompt = {("tokens", "prompt"): rows["tokens"], ("tokens", "prompt_length"): torch.full((3, 1), 12)}
        prompt |= {"turn": torch.zeros(3, 1, dtype=torch.int64), "episode_id": torch.arange(3).unsqueeze(-1)}
        answers = [policy(TensorDict(prompt, batch_size=[3]))[("tokens", "response")] for policy in policies]
        assert torch.equal(*answers)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    def test_a_model_without_known_layers(self):
        with pytest.raises(ValueError, match="Linear has no layers"):
            compile_layers(torch.nn.Linear(2, 2))


class TestFiles:
    def test_load_what_was_saved(self, lora, tmp_path):
        models = load_actor_critic(make_model(), lora=lora, critic=True)
        perturb(models)
        expected = outputs(models)
        models.save_pretrained(tmp_path)
        fresh = load_actor_critic(make_model(), lora=lora, critic=True, seed=5)
        assert not torch.allclose(outputs(fresh)[0], expected[0])
        fresh.load_pretrained(tmp_path)
        for value, other in zip(outputs(fresh), expected, strict=True):
            assert torch.equal(value, other)
        assert all(p.requires_grad for p in fresh.actor_parameters() + fresh.critic_parameters())
        assert len(fresh.actor_parameters()) == len(models.actor_parameters())

    def test_others_may_read_the_weights(self, lora, tmp_path):
        """As all new files; safetensors' own are readable for their owner alone."""
        models = load_actor_critic(make_model(), lora=lora, critic=True)
        private = tmp_path / "private" / "model.safetensors"
        private.parent.mkdir()
        private.touch(0o600)
        models.save_pretrained(tmp_path)
        models.export_merged(tmp_path / "merged")
        (tmp_path / "new").touch()
        written = {path for path in tmp_path.rglob("*") if path.is_file()} - {private}
        assert {path.stat().st_mode for path in written} == {(tmp_path / "new").stat().st_mode}
        assert private.stat().st_mode & 0o777 == 0o600  # not written here

    def test_adapters_load_with_plain_peft(self, tmp_path):
        models = load_actor_critic(make_model(), lora=LoraConfig(**LORA), critic=True)
        perturb(models)
        models.save_pretrained(tmp_path)
        ids = make_rows()["tokens"]
        for name in ("actor", "critic"):
            files = {path.name for path in (tmp_path / name).iterdir()}
            assert {"adapter_config.json", "adapter_model.safetensors"} <= files
            loaded = PeftModel.from_pretrained(make_model(), tmp_path / name).to(device())
            with use_adapter(models.model, name):
                assert torch.equal(loaded(input_ids=ids).logits, models.model(input_ids=ids).logits)

    def test_full_weights_load_with_plain_transformers(self, tmp_path):
        models = load_actor_critic(make_model())
        perturb(models)
        models.save_pretrained(tmp_path)
        ids = make_rows()["tokens"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").to(device())
        assert torch.equal(loaded(input_ids=ids).logits, models.model(input_ids=ids).logits)
        assert not (tmp_path / "critic").exists()

    def test_an_adapter_that_does_not_fit(self, tmp_path):
        load_actor_critic(make_model(), lora=LoraConfig(**LORA)).save_pretrained(tmp_path)
        for other in ({**LORA, "r": 8}, {**LORA, "target_modules": ["q_proj"]}):
            models = load_actor_critic(make_model(), lora=LoraConfig(**other))
            with pytest.raises(AdapterError, match=r"adapter_config\.json"):
                models.load_pretrained(tmp_path)
