"""Weights on disk: what is written, what is read back, and LoRA settings that differ, on random
tiny Qwen2 models."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from tiny_actor_critic import LORA, make_model, make_rows, outputs, perturb
from transformers import AutoModelForCausalLM

from torchrl_llm import keys
from torchrl_llm.modules import AdapterError, HFPolicy, SamplingConfig, WeightsError, load_actor_critic, use_adapter
from torchrl_llm.modules.weights import adapter_of, fit_adapter, load_adapters, read_adapter
from torchrl_llm.testing.tokenizers import byte_tokenizer

EVERYTHING = {"critic": True, "reference": "adapter"}
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj", "up_proj")


def make_lora(**fields) -> LoraConfig:
    return LoraConfig(**(LORA | fields))


def make(lora: LoraConfig | None, *, seed: int = 0, moved: bool = True, **options):
    """Models on the same float64 base, every adapter of which does something of its own."""
    models = load_actor_critic(make_model(), dtype="float64", lora=lora, seed=seed, **options)
    if moved:
        perturb(models, seed)
        if models.reference is not None and models.reference.adapter == "reference":
            move_reference(models, seed)
    return models


def move_reference(models, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, parameter in models.model.named_parameters():
            if "reference" in name.split("."):
                step = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(step.to(parameter.device))


def logits(models, adapter: str | None = "actor") -> torch.Tensor:
    with torch.no_grad(), use_adapter(models.model, adapter):
        return models.model(input_ids=make_rows()["tokens"]).logits


def functions(models) -> dict[str, torch.Tensor]:
    """What actor, critic and reference compute."""
    found = dict(zip(("actor", "value", "bootstrap"), outputs(models), strict=False))
    if models.reference is not None:
        found["reference"] = models.reference(make_rows())["log_prob"]
    return found


def same(a, b, *names: str, atol: float = 0.0) -> None:
    for name in names or a.keys() | b.keys():
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol)


@pytest.fixture(params=["lora", "full"])
def settings_of_both(request) -> dict:
    if request.param == "lora":
        return {"lora": make_lora(), "critic": True, "reference": "adapter"}
    return {"lora": None, "critic": True, "reference": True}


class TestSavedAndLoaded:
    def test_three_roles(self, settings_of_both, tmp_path):
        models = make(**settings_of_both, seed=1)
        models.refresh_reference()
        perturb(models, seed=7)  # now the actor is not the reference
        models.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"actor", "critic", "reference"}
        fresh = make(**settings_of_both, seed=2)
        parameters = [id(p) for p in fresh.actor_parameters() + fresh.critic_parameters()]
        fresh.load_pretrained(tmp_path)
        same(functions(fresh), functions(models))
        assert [id(p) for p in fresh.actor_parameters() + fresh.critic_parameters()] == parameters

    def test_no_pickle_among_the_files(self, settings_of_both, tmp_path):
        make(**settings_of_both).save_pretrained(tmp_path)
        kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".json", ".md"}

    def test_reference_of_the_base_is_not_written(self, tmp_path):
        make(make_lora(), reference=True).save_pretrained(tmp_path)
        assert not (tmp_path / "reference").exists()

    def test_missing_parts_stay_as_they_are(self, settings_of_both, tmp_path):
        actor_only = make(settings_of_both["lora"], seed=1)
        actor_only.save_pretrained(tmp_path)
        models = make(**settings_of_both, seed=2)
        before = functions(models)
        models.load_pretrained(tmp_path)
        after = functions(models)
        same(after, before, "value", "bootstrap", "reference")
        same(after, functions(actor_only), "actor")
        actor_only.load_pretrained(tmp_path)  # nor is anything needed that the models do not have
        same(functions(actor_only), after, "actor")

    def test_overwrite_reference(self, settings_of_both, tmp_path):
        trained = make(**settings_of_both, seed=1)
        trained.save_pretrained(tmp_path)
        models = make(**settings_of_both, seed=2)
        models.load_pretrained(tmp_path, overwrite_reference_adapter=True)
        expected = functions(trained)
        assert not torch.allclose(expected["reference"], expected["actor"])
        same(functions(models), expected | {"reference": expected["actor"]})
        assert not models.reference(make_rows())["log_prob"].requires_grad
        assert len(models.actor_parameters()) == len(trained.actor_parameters())

    def test_overwrite_critic(self, settings_of_both, tmp_path):
        trained = make(**settings_of_both, seed=1)
        trained.save_pretrained(tmp_path)
        models = make(**settings_of_both, seed=2)
        head = [p.clone() for p in models.critic.value_head.parameters()]
        models.load_pretrained(tmp_path, overwrite_critic_adapter=True)
        assert all(map(torch.equal, head, models.critic.value_head.parameters()))
        trained.critic = models.critic.__class__(trained.model, adapter=trained.adapter)
        trained.critic.value_head = models.critic.value_head
        same(functions(models), functions(trained), "value", "bootstrap", "actor")

    def test_a_shared_critic_is_its_head(self, settings_of_both, tmp_path):
        lora = settings_of_both["lora"]
        shared = make(lora, seed=1, critic="shared")
        shared.save_pretrained(tmp_path / "shared")
        assert [path.name for path in (tmp_path / "shared" / "critic").iterdir()] == ["value_head.safetensors"]
        for critic in ("shared", True):  # its trunk is the actor's
            models = make(lora, seed=2, critic=critic)
            models.load_pretrained(tmp_path / "shared")
            same(functions(models), functions(shared))
        make(lora, critic=True).save_pretrained(tmp_path / "own")
        with pytest.raises(WeightsError, match="shares the actor's"):
            shared.load_pretrained(tmp_path / "own")

    def test_what_cannot_be_overwritten(self, tmp_path):
        make(make_lora()).save_pretrained(tmp_path)
        with pytest.raises(AdapterError, match=r'base model with adapters off.*reference="adapter"'):
            make(make_lora(), reference=True).load_pretrained(tmp_path, overwrite_reference_adapter=True)
        with pytest.raises(AdapterError, match=r"there is no reference\. .*reference=True"):
            make(None).load_pretrained(tmp_path, overwrite_reference_adapter=True)
        with pytest.raises(AdapterError, match="there is no critic"):
            make(make_lora()).load_pretrained(tmp_path, overwrite_critic_adapter=True)


class TestFilesThatAreWrong:
    def test_adapters_and_whole_models(self, tmp_path):
        make(make_lora()).save_pretrained(tmp_path / "lora")
        make(None).save_pretrained(tmp_path / "full")
        with pytest.raises(WeightsError, match="holds a LoRA adapter, but the model here has none"):
            make(None).load_pretrained(tmp_path / "lora")
        with pytest.raises(WeightsError, match=r"holds no LoRA adapter.*whole model"):
            make(make_lora()).load_pretrained(tmp_path / "full")
        for lora in (None, make_lora()):
            with pytest.raises(WeightsError, match=r"nowhere.*(does not exist|holds no LoRA adapter)"):
                make(lora).load_pretrained(tmp_path / "nowhere")

    @pytest.mark.parametrize("r", [4, 6])
    def test_tensors_that_are_too_many_or_too_few(self, tmp_path, r):
        make(make_lora()).save_pretrained(tmp_path)
        models = make(make_lora(r=r))
        file = tmp_path / "actor" / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {"extra": torch.zeros(2)}, file)
        with pytest.raises(AdapterError, match=r"extra has shape \(2,\) there and None here"):
            models.load_pretrained(tmp_path, merge_lora_configs=True)
        for factor in ("lora_A", "lora_B"):
            lost = next(name for name in tensors if factor in name)
            save_file({name: x for name, x in tensors.items() if name != lost}, file)
            with pytest.raises(WeightsError, match=r"lacks one of the factors of 'model.layers.0"):
                models.load_pretrained(tmp_path, merge_lora_configs=True)

    @pytest.mark.parametrize("part", ["actor", "critic", "reference", "head"])
    def test_damage_is_named_and_changes_nothing(self, settings_of_both, tmp_path, part):
        make(**settings_of_both, seed=1).save_pretrained(tmp_path)
        name = "adapter_model" if settings_of_both["lora"] else "model"
        file = (
            tmp_path / "critic" / "value_head.safetensors"
            if part == "head"
            else tmp_path / part / f"{name}.safetensors"
        )
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        models = make(**settings_of_both, seed=2)
        before = functions(models)
        with pytest.raises(WeightsError, match="critic" if part == "head" else part):
            models.load_pretrained(tmp_path)
        same(functions(models), before)

    def test_pickles_are_not_read(self, settings_of_both, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "exploded"),)

        make(**settings_of_both).save_pretrained(tmp_path)
        name = "adapter_model" if settings_of_both["lora"] else "pytorch_model"
        for file in (tmp_path / "actor").glob("*.safetensors"):
            file.unlink()
        (tmp_path / "actor" / f"{name}.bin").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(WeightsError):
            make(**settings_of_both).load_pretrained(tmp_path)
        assert not (tmp_path / "exploded").exists()

    def test_another_base(self, settings_of_both, tmp_path):
        options = {key: value for key, value in settings_of_both.items() if key != "reference"}
        load_actor_critic(make_model(hidden_size=16, num_attention_heads=1), **options).save_pretrained(tmp_path)
        models = load_actor_critic(make_model(), **options)
        before = functions(models)
        for merge in (False, True):
            with pytest.raises((WeightsError, AdapterError), match=r"another (base )?model"):
                models.load_pretrained(tmp_path, merge_lora_configs=merge)
        same(functions(models), before)

    @pytest.mark.parametrize("r", [4, 6])
    @pytest.mark.parametrize("layers", [1, 3])
    def test_another_number_of_layers(self, tmp_path, layers, r):
        load_actor_critic(make_model(num_hidden_layers=layers), lora=make_lora()).save_pretrained(tmp_path)
        models = make(make_lora(r=r))
        before = logits(models)
        # an adapter of the first layer alone is a legitimate thing to merge
        if layers == 1 and r == 6:
            models.load_pretrained(tmp_path, merge_lora_configs=True)
            return
        with pytest.raises(AdapterError, match="another base model"):
            models.load_pretrained(tmp_path, merge_lora_configs=True)
        assert torch.equal(logits(models), before)


class TestOtherSettings:
    def test_an_error_lists_the_fields_with_both_values(self, tmp_path):
        make(make_lora(lora_alpha=8)).save_pretrained(tmp_path)
        models = make(make_lora(r=2, lora_alpha=4, target_modules=["q_proj"], use_rslora=True), seed=1)
        before = logits(models)
        with pytest.raises(AdapterError) as caught:
            models.load_pretrained(tmp_path)
        lines = [line.strip() for line in str(caught.value).splitlines()]
        assert lines[1:-1] == [
            "lora_alpha: 8 there, 4 here",
            "r: 4 there, 2 here",
            "target_modules: ['q_proj', 'v_proj'] there, ['q_proj'] here",
            "use_rslora: False there, True here",
        ]
        assert "merge_lora_configs=True" in lines[-1]
        assert torch.equal(logits(models), before)

    def test_settings_that_mean_the_same(self, tmp_path):
        make(make_lora()).save_pretrained(tmp_path)
        models = make(make_lora(target_modules=r".*\.(q|v)_proj", init_lora_weights="gaussian"), seed=1)
        models.load_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("there", "here"),
        [
            ({"r": 2}, {"r": 8, "lora_alpha": 32}),  # the checkpoint is smaller
            ({"r": 8, "lora_alpha": 32}, {"r": 2}),  # the live one is
            # disjoint
            ({"target_modules": ["q_proj"]}, {"target_modules": ["down_proj", "v_proj"]}),
            ({"use_rslora": True}, {"r": 6}),
            ({"rank_pattern": {"v_proj": 7}, "alpha_pattern": {r"layers\.0.*q_proj": 3}}, {}),
            ({}, {"rank_pattern": {"v_proj": 7}, "alpha_pattern": {"q_proj": 3}}),
            ({"layers_to_transform": [0]}, {"layers_to_transform": [1]}),
            ({"target_modules": ["embed_tokens"]}, {"r": 2}),
            ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"], "r": 7}),
        ],
    )
    def test_merging_changes_no_function(self, tmp_path, there, here):
        trained = make(make_lora(**there), seed=1, **EVERYTHING)
        trained.save_pretrained(tmp_path / "trained")
        models = make(make_lora(**here), seed=2, **EVERYTHING)
        expected = functions(trained)
        with pytest.raises(AdapterError, match="are not those"):
            models.load_pretrained(tmp_path / "trained")
        models.load_pretrained(tmp_path / "trained", merge_lora_configs=True)
        same(functions(models), expected, atol=1e-12)
        torch.testing.assert_close(logits(models), logits(trained), rtol=0, atol=1e-12)
        # What is written then is a checkpoint like any other.
        models.save_pretrained(tmp_path / "merged")
        again = make(read_adapter(tmp_path / "merged" / "actor").config, seed=3, **EVERYTHING)
        again.load_pretrained(tmp_path / "merged")
        same(functions(again), functions(models))

    def test_adapters_that_are_not_read_keep_their_functions(self, tmp_path):
        trained = make(make_lora(r=8, target_modules=["o_proj", "q_proj"]), seed=1)
        trained.save_pretrained(tmp_path)
        models = make(make_lora(), seed=2, **EVERYTHING)
        before = functions(models)
        models.load_pretrained(tmp_path, merge_lora_configs=True)
        after = functions(models)
        same(after, before, "value", "bootstrap", "reference", atol=1e-12)
        same(after, functions(trained), "actor", atol=1e-12)
        configs = [models.model.peft_config[name] for name in ("actor", "critic", "reference")]
        assert {config.r for config in configs} == {8}
        assert {config.lora_alpha / config.r for config in configs} == {LoraConfig().lora_alpha / 4}
        models.refresh_reference()  # all three have the same settings
        same({"actor": models.reference(make_rows())["log_prob"]}, functions(trained), "actor", atol=1e-12)

    def test_settings_here_that_cover_the_checkpoint_stay(self, tmp_path):
        make(make_lora(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
        models = make(make_lora(), **EVERYTHING)
        parameters, config = models.actor_parameters(), models.model.peft_config["actor"].to_dict()
        models.load_pretrained(tmp_path, merge_lora_configs=True)
        assert all(a is b for a, b in zip(parameters, models.actor_parameters(), strict=True))
        assert models.model.peft_config["actor"].to_dict() == config

    @given(
        ranks=st.tuples(st.integers(1, 9), st.integers(1, 9)),
        alphas=st.tuples(st.integers(1, 64), st.integers(1, 64)),
        targets=st.tuples(*[st.sets(st.sampled_from(MODULES), min_size=1, max_size=3)] * 2),
        rslora=st.tuples(st.booleans(), st.booleans()),
    )
    @settings(max_examples=8)
    def test_merging_any_two(self, tmp_path_factory, ranks, alphas, targets, rslora):
        path = tmp_path_factory.mktemp("any")
        fields = [
            {"r": r, "lora_alpha": a, "target_modules": sorted(t), "use_rslora": s}
            for r, a, t, s in zip(ranks, alphas, targets, rslora, strict=True)
        ]
        trained, models = make(make_lora(**fields[0]), seed=1), make(make_lora(**fields[1]), seed=2)
        trained.save_pretrained(path)
        models.load_pretrained(path, merge_lora_configs=True)
        torch.testing.assert_close(logits(models), logits(trained), rtol=0, atol=1e-11)

    def test_what_was_added_can_be_trained(self, tmp_path):
        make(make_lora(r=2, target_modules=["q_proj"]), seed=1).save_pretrained(tmp_path)
        models = make(make_lora(r=3, target_modules=["v_proj"]), seed=2, **EVERYTHING)
        models.load_pretrained(tmp_path, merge_lora_configs=True)
        assert not any(m.training for m in models.model.modules())
        td = models.critic(make_rows())
        (models.actor(make_rows())["log_prob"].sum() + td["state_value"].sum()).backward()
        parameters = dict(models.model.named_parameters())
        for adapter in ("actor", "critic"):
            factors = {n: p for n, p in parameters.items() if f"lora_B.{adapter}." in n}
            assert len(factors) == 4
            # each column of each B
            assert all((p.grad.abs().amax(0) > 0).all() for p in factors.values())
        assert not any(p.requires_grad for n, p in parameters.items() if ".reference." in n)
        assert {id(p) for p in models.actor_parameters()} == {id(p) for n, p in parameters.items() if ".actor." in n}

    def test_a_policy_follows(self, tmp_path):
        trained = make(make_lora(r=8, target_modules=["o_proj"]), seed=1)
        trained.save_pretrained(tmp_path)
        models = make(make_lora(), seed=2)
        sampling = SamplingConfig(max_output_tokens=6, stop_ids=())
        policies = [HFPolicy(m.model, byte_tokenizer(), sampling, adapter="actor") for m in (models, trained)]
        tokens = make_rows()["tokens"]
        prompt = {
            keys.PROMPT: tokens,
            keys.PROMPT_LENGTH: torch.full((3, 1), 12),
            keys.TURN: torch.zeros(3, 1, dtype=torch.int64),
            keys.EPISODE_ID: torch.arange(3).unsqueeze(-1),
        }

        def play(policy):
            return policy(TensorDict(prompt, batch_size=[3]).to(tokens.device))[keys.RESPONSE_LOG_PROBS]

        before = play(policies[0])
        models.load_pretrained(tmp_path, merge_lora_configs=True)
        policies[0].weights_changed()
        after = play(policies[0])
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, play(policies[1]), rtol=0, atol=1e-6)

    @pytest.mark.parametrize(
        ("there", "here", "field"),
        [
            ({"use_dora": True}, {}, "use_dora: True there, False here"),
            ({"modules_to_save": ["lm_head"]}, {}, r"modules_to_save: \['lm_head'\] there, None here"),
            ({"use_dora": True}, {"use_dora": True, "r": 8}, "use_dora: True there, True here"),
            ({"trainable_token_indices": [3]}, {"trainable_token_indices": [3], "r": 8}, "trainable_token_indices"),
        ],
    )
    def test_what_cannot_be_merged_is_named(self, tmp_path, there, here, field):
        make(make_lora(**there)).save_pretrained(tmp_path)
        models = make(make_lora(**here), seed=1)
        before = logits(models)
        with pytest.raises(AdapterError, match=f"cannot be merged(.|\n)*{field}"):
            models.load_pretrained(tmp_path, merge_lora_configs=True)
        assert torch.equal(logits(models), before)

    def test_padding_alone(self):
        source = adapter_of(make(make_lora(r=2, lora_alpha=6)).model, "actor")
        target = adapter_of(make(make_lora(r=5, lora_alpha=5), seed=1).model, "actor")
        fitted = fit_adapter(source, target)
        for module in source.ranks:
            a, b = (f"base_model.model.{module}.lora_{x}.weight" for x in "AB")
            product = 3.0 * source.tensors[b] @ source.tensors[a]
            torch.testing.assert_close(fitted[b] @ fitted[a], product, rtol=0, atol=1e-14)
            assert fitted[a].shape == target.tensors[a].shape
        assert len(source.ranks) == 4

    def test_adapters_of_another_library(self, tmp_path):
        # Such files have trained dropout, a task type and other tools' keys; none of it changes the
        # function.
        trained = make(make_lora())
        trained.save_pretrained(tmp_path)
        file = tmp_path / "actor" / "adapter_config.json"
        config = json.loads(file.read_text()) | {"lora_dropout": 0.05, "task_type": "CAUSAL_LM", "revision": "main"}
        file.write_text(json.dumps(config))
        models = make(make_lora(), seed=1)
        load_adapters(models.model, {"actor": tmp_path / "actor"})
        assert torch.equal(logits(models), logits(trained))
        file.write_text(json.dumps(config | {"bias": "all"}))
        with pytest.raises(AdapterError, match=r"cannot be merged(.|\n)*bias: 'all' there, 'none' here"):
            models.load_pretrained(tmp_path, merge_lora_configs=True)


class TestExport:
    @pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
    def test_logits(self, tmp_path, fields):
        models = load_actor_critic(make_model(), lora=make_lora(**fields), **EVERYTHING)
        perturb(models)
        models.export_merged(tmp_path)
        tokens = make_rows()["tokens"]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).to(tokens.device)
        with torch.no_grad():
            found = loaded(input_ids=tokens).logits
        torch.testing.assert_close(found, logits(models), rtol=0, atol=1e-5)
        assert not torch.allclose(found, logits(models, None), atol=1e-3)
        assert not any("lora" in name or "modules_to_save" in name for name in loaded.state_dict())

    def test_the_live_models_do_not_notice(self, settings_of_both, tmp_path):
        models = make(**settings_of_both)
        state = {name: value.clone() for name, value in models.model.state_dict().items()}
        flags = {name: p.requires_grad for name, p in models.model.named_parameters()}
        before = functions(models)
        models.export_merged(tmp_path)
        after = models.model.state_dict()
        assert state.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in state.items())
        assert flags == {name: p.requires_grad for name, p in models.model.named_parameters()}
        same(functions(models), before)

    def test_tied_embeddings(self, tmp_path):
        model = make_model(tie_word_embeddings=True)
        models = load_actor_critic(model, lora=make_lora(target_modules=["q_proj", "lm_head"]))
        with pytest.raises(WeightsError, match=r"changes \['lm_head'\].*tied"):
            models.export_merged(tmp_path)
        load_actor_critic(make_model(tie_word_embeddings=True), lora=make_lora()).export_merged(tmp_path)

    @pytest.mark.extra
    def test_plain_transformers_in_another_process(self, tmp_path):
        base, trained, merged = (tmp_path / name for name in ("base", "trained", "merged"))
        make_model().save_pretrained(base)
        models = load_actor_critic(base, lora=make_lora())
        perturb(models)
        models.save_pretrained(trained)
        models.export_merged(merged, byte_tokenizer())
        ids = make_rows()["tokens"].tolist()
        script = f"""
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = torch.tensor({ids})
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), {str(trained / "actor")!r})
merged = AutoModelForCausalLM.from_pretrained({str(merged)!r})
assert AutoTokenizer.from_pretrained({str(merged)!r}).eos_token_id == 2
assert not any(name.startswith("torchrl") for name in sys.modules)
torch.save([model(input_ids=ids).logits.detach() for model in (adapted, merged)], {str(tmp_path / "logits.pt")!r})
"""
        file = tmp_path / "script.py"
        file.write_text(script)
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        adapted, exported = torch.load(tmp_path / "logits.pt")
        torch.testing.assert_close(adapted, logits(models).cpu(), rtol=0, atol=1e-6)
        torch.testing.assert_close(exported, logits(models).cpu(), rtol=0, atol=1e-5)


def test_folders_of_adapters_can_be_moved(tmp_path):
    models = make(make_lora(), **EVERYTHING)
    models.save_pretrained(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    models.load_pretrained(Path(str(tmp_path / "b")))
