"""What PyTorch is set to while a trainer works, and the precision that follows from settings and
device."""

import pytest
import torch
from small_runs import one_batch, small_config

from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.device import make_numerics, mixed_precision
from torchrl_llm.trainers import Callback, Numerics

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def switches():
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


def attention_of(model):
    """A module that every forward runs."""
    return model.model.layers[0].self_attn


class Switches(Callback):
    """Notes them in a rollout, and in an optimizer step."""

    def __init__(self):
        self.found = {}

    def on_start(self, trainer):
        attention_of(trainer.policy.model).register_forward_pre_hook(
            lambda *_: self.found.setdefault("learns" if torch.is_grad_enabled() else "samples", switches()) and None
        )


@pytest.fixture
def workspace(monkeypatch):
    """A GPU needs the variable to compute the same twice."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class TestNumerics:
    def test_hold_while_a_run_works_and_not_after(self, tmp_path, workspace):
        seen, before = Switches(), switches()
        config = small_config(tmp_path, max_iterations=1, float32_matmul_precision="high", deterministic=True)
        run = build_run(config, callbacks=[seen])
        assert switches() == before
        run.trainer.train()
        assert switches() == before == ("highest", False)
        # PyTorch has no deterministic cumulative sum on a GPU, which sampling takes.
        assert seen.found == {"samples": ("high", False), "learns": ("high", True)}
        run.close()

    def test_a_step_by_hand_has_them_and_an_error_leaves_none(self, tmp_path, workspace):
        run = build_run(small_config(tmp_path, deterministic=True, float32_matmul_precision="highest"))
        rows, found = one_batch(run), []
        attention_of(run.models.model).register_forward_pre_hook(lambda *_: found.append(switches()))
        run.trainer.learn(rows)
        assert set(found) == {("highest", True)}
        assert switches() == ("highest", False)
        with pytest.raises(KeyError):
            run.trainer.update(rows.exclude("advantage"))
        assert switches() == ("highest", False)
        run.close()

    def test_what_the_process_has_chosen_stays(self):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        try:
            with Numerics(deterministic=True, float32_matmul_precision="highest").learning():
                assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            with Numerics().learning():
                assert switches() == ("medium", True)
        finally:
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")

    @pytest.mark.parametrize("numerics", [Numerics(), Numerics(float32_matmul_precision="highest")])
    def test_a_precision_that_the_process_has_chosen_for_a_backend_alone_stays(self, numerics):
        """PyTorch refuses to say its precision of all backends then."""
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        try:
            with numerics.products():
                pass
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        finally:
            torch.set_float32_matmul_precision("highest")


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "device", "expected"), [(None, CPU, None), (None, CUDA, "high"), ("highest", CUDA, "highest")]
    )
    def test_products_of_a_gpu_are_tf32_unless_they_are_not_to_be(self, given, device, expected):
        assert (
            make_numerics(RunSettings.from_values(float32_matmul_precision=given), device).float32_matmul_precision
            == expected
        )

    def test_deterministic_needs_a_variable_on_a_gpu(self, monkeypatch):
        config = RunSettings.from_values(deterministic=True)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        assert make_numerics(config, CPU).deterministic
        with pytest.raises(ConfigError, match=r"Start the run with CUBLAS_WORKSPACE_CONFIG=:4096:8"):
            make_numerics(config, CUDA)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        assert make_numerics(config, CUDA).deterministic

    @pytest.mark.parametrize(
        ("settings", "on_cpu", "on_gpu"),
        [
            ({"dtype": "bfloat16"}, "no", "bf16"),
            ({"dtype": "bfloat16", "mixed_precision": "no"}, "no", "no"),
            ({"dtype": "float32"}, "no", "no"),
            ({"dtype": "float16"}, "no", "no"),
            ({"dtype": "auto"}, "no", "no"),  # the tiny model's files are float32
            ({"dtype": "auto", "quantization": "nf4"}, "no", "bf16"),
            ({"dtype": "bfloat16", "lora_r": 0}, "bf16", "bf16"),
        ],
    )
    def test_adapters_on_a_base_in_bfloat16_compute_in_it_on_a_gpu(self, settings, on_cpu, on_gpu):
        config = RunSettings.from_values(model_path="tiny", **settings)
        assert (mixed_precision(config, CPU), mixed_precision(config, CUDA)) == (on_cpu, on_gpu)
