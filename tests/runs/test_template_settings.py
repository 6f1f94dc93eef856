"""The settings of what a model reads: a chat template of one's own, and where a response ends."""

from __future__ import annotations

import shutil
from datetime import date
from itertools import takewhile

import pytest
from small_runs import one_batch, small_config

from torchrl_llm import keys
from torchrl_llm.cli._fit import fit
from torchrl_llm.envs import CHATML
from torchrl_llm.runs import ConfigError, RunSettings, build_run
from torchrl_llm.runs.export import export_model
from torchrl_llm.runs.saved import find_saved_model, load_saved_model
from torchrl_llm.runs.settings_file import as_yaml
from torchrl_llm.testing.environments import Echo

OWN = CHATML.replace("{% for", "{# Own: tabs\t, “quotes” and\u2028lines #}{% for", 1).replace("\n", "\n \t\n")


@pytest.fixture
def template(tmp_path):
    """A file with a template that is not the tokenizer's."""
    path = tmp_path / "own.jinja"
    path.write_text(OWN, encoding="utf-8")
    return path


class TestChatTemplate:
    def test_it_takes_the_place_of_the_tokenizers(self, tmp_path, template):
        run = build_run(small_config(tmp_path, chat_template=str(template)), env=Echo)
        rows = one_batch(run)
        text = run.tokenizer.decode(rows[keys.TOKENS][0][rows[keys.ATTENTION_MASK][0]])
        assert text.startswith("<|im_start|>user\n \t\n")
        assert run.config.chat.chat_template == OWN
        run.close()

    def test_it_is_kept_with_what_was_trained(self, tmp_path, template):
        config = small_config(tmp_path, chat_template=str(template), save_checkpoints=True, lora_r=2, max_iterations=1)
        run = build_run(config, env=Echo)
        expected = run.trainer.collector.env.formatter.start("Hi.")
        run.trainer.train()
        template.unlink()
        assert RunSettings.from_yaml(config.output.output_dir / "config.yaml").chat.chat_template == OWN
        saved = find_saved_model(config.output.output_dir)
        folders = [export_model(saved, tmp_path / form, format=form) for form in ("adapter", "merged")]
        # an adapter may be copied without its tokenizer
        (folders[0] / "chat_template.jinja").unlink()
        for folder in (config.output.output_dir, *folders):
            found = find_saved_model(folder)
            loaded = load_saved_model(found, found.config(device="cpu"))
            assert loaded.formatter.start("Hi.") == expected

    def test_a_resumed_run_has_the_same(self, tmp_path, template):
        settings = {"save_checkpoints": True, "max_iterations": 1}
        build_run(small_config(tmp_path, chat_template=str(template), **settings), env=Echo).trainer.train()
        moved = shutil.move(template, tmp_path / "elsewhere.jinja")
        build_run(small_config(tmp_path, chat_template=str(moved), resume=True, **settings), env=Echo).close()
        moved.write_text(CHATML)
        with pytest.raises(ConfigError, match=r"The settings differ from those of .*: chat_template was"):
            build_run(small_config(tmp_path, chat_template=str(moved), resume=True, **settings), env=Echo)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (
                "{folder}/onw.jinja",
                r"is not a Jinja template .* and no file that can be read.*Did you mean '.*/own\.jinja'",
            ),
            ("chatml", "is not a Jinja template .* and no file that can be read"),
            ("a\0b", "is not a Jinja template .* and no file that can be read"),
            ("{folder}", "is not a Jinja template .* and no file that can be read"),
            ("{folder}/latin", "is not a Jinja template .* and no file that can be read"),
            ("{folder}/plain.txt", "that file holds no Jinja template"),
        ],
    )
    def test_what_is_none_is_refused(self, tmp_path, template, given, said):
        (tmp_path / "plain.txt").write_text("User: and then the assistant")
        (tmp_path / "latin").write_bytes(b"caf\xe9 {{ messages }}")
        with pytest.raises(ConfigError, match=f"(?s)chat_template is .*{said}"):
            RunSettings.from_values(chat_template=given.replace("{folder}", str(tmp_path)))

    def test_its_text_survives_a_settings_file(self, tmp_path):
        path = tmp_path / "config.yaml"
        for text in (OWN, "{{ messages }}\n\n", "\n  {% if x %}: # no comment'\"\\n{% endif %}", CHATML):
            path.write_text(as_yaml({"chat": {"chat_template": text}}), encoding="utf-8")
            assert RunSettings.from_yaml(path).chat.chat_template == text


class TestDate:
    TEMPLATE = "Today: {{ strftime_now('%d %b %Y') }}\n" + CHATML

    def prompt(self, run):
        return run.trainer.collector.env.formatter.start("Hi."), run.evaluation_env.formatter.start("Hi.")

    def test_a_run_keeps_the_day_on_which_it_began(self, tmp_path, monkeypatch):
        settings = {"chat_template": self.TEMPLATE, "save_checkpoints": True, "max_iterations": 1}
        first = build_run(small_config(tmp_path, **settings), env=Echo)
        prompts = self.prompt(first)
        first.trainer.train()
        day = first.config.chat.template_date
        assert prompts[0] == prompts[1]
        assert RunSettings.from_yaml(first.config.output.output_dir / "config.yaml").chat.template_date == day

        class Later(date):
            @classmethod
            def today(cls):
                return cls(2031, 7, 1)

        for module in ("torchrl_llm.envs.chat", "torchrl_llm.runs.settled"):
            monkeypatch.setattr(f"{module}.date", Later)
        resumed = build_run(small_config(tmp_path, resume=True, **settings), env=Echo)
        assert resumed.config.chat.template_date == day
        assert self.prompt(resumed) == prompts
        resumed.close()
        saved = find_saved_model(first.config.output.output_dir)
        loaded = load_saved_model(saved, saved.config(device="cpu"))
        assert loaded.formatter.start("Hi.") == prompts[0]
        accepted = {"resume": True, "accept_changes": ["template_date"]}
        other = build_run(small_config(tmp_path, **settings, **accepted), env=Echo)
        assert other.config.chat.template_date == "2031-07-01"
        assert self.prompt(other) != prompts
        other.close()

    def test_it_can_be_set(self, tmp_path):
        run = build_run(small_config(tmp_path, chat_template=self.TEMPLATE, template_date="2024-02-29"), env=Echo)
        assert run.tokenizer.decode(self.prompt(run)[0]).startswith("Today: 29 Feb 2024\n")
        run.close()
        with pytest.raises(
            ConfigError, match=r"template_date='2024-02-29' does nothing: the chat template shows no date"
        ):
            build_run(small_config(tmp_path, template_date="2024-02-29"), env=Echo)
        with pytest.raises(ConfigError, match="template_date is 'today'; expected a day"):
            small_config(tmp_path, template_date="today")

    def test_a_template_without_a_date_has_none(self, tmp_path):
        run = build_run(small_config(tmp_path), env=Echo)
        assert run.config.chat.template_date is None
        run.close()

    def test_doctor_names_it(self, tmp_path):
        names = {}
        for template in (self.TEMPLATE, None):
            found = fit(small_config(tmp_path, chat_template=template))
            names[template] = [
                each.text for each in takewhile(lambda each: each.name != "prompt", found) if each.name == "date"
            ]
        assert names[None] == []
        assert f"keeps that of its first day ({date.today()}, template_date)" in names[self.TEMPLATE][0]


def test_a_run_of_a_version_without_these_settings_is_resumed(tmp_path, monkeypatch):
    settings = {"save_checkpoints": True, "max_iterations": 1}
    as_json = RunSettings.as_json
    with monkeypatch.context() as before:
        before.setattr(
            RunSettings,
            "as_json",
            lambda self: {
                name: value
                for name, value in as_json(self).items()
                if name not in ("chat_template", "missing_thinking", "template_date", "stop_ids")
            },
        )
        build_run(small_config(tmp_path, **settings), env=Echo).trainer.train()
    with pytest.raises(ConfigError, match="missing_thinking was 'refuse', is 'empty'"):
        build_run(small_config(tmp_path, resume=True, missing_thinking="empty", **settings), env=Echo)
    build_run(small_config(tmp_path, resume=True, **settings), env=Echo).close()


class TestStopIds:
    def test_responses_end_at_them(self, tmp_path):
        stops = tuple(range(5, 100))
        config = small_config(tmp_path, stop_ids=[*stops], max_output_tokens=32, min_output_tokens=2, batch_size=16)
        run = build_run(config, env=Echo)
        assert run.policy.stop_ids == run.models.actor.held_back == run.config.sampling.stop_ids == stops
        assert run.trainer.collector.env.formatter.stop_ids == stops
        rows = one_batch(run)
        ids, turn = rows[keys.TOKENS], rows[keys.TURN_IDS]
        ends = (turn >= 0) & (turn.roll(-1, 1) != turn)
        stopped = (ids >= 5) & (ids < 100) & (turn >= 0)
        assert stopped.sum() >= 8
        assert ends[stopped].all()
        run.close()

    def test_they_are_kept_with_what_was_trained(self, tmp_path):
        config = small_config(tmp_path, stop_ids=[7, 9], save_checkpoints=True, max_iterations=1)
        build_run(config, env=Echo).trainer.train()
        saved = find_saved_model(config.output.output_dir)
        assert load_saved_model(saved, saved.config(device="cpu")).policy.stop_ids == (7, 9)
        assert load_saved_model(saved, saved.config(device="cpu", stop_ids=[8])).policy.stop_ids == (8,)

    def test_ids_of_no_token_are_refused(self, tmp_path):
        with pytest.raises(ConfigError, match=r"stop_ids \[123456\] are not ids of the model, whose vocabulary has"):
            build_run(small_config(tmp_path, stop_ids=[123456]), env=Echo)
        found = next(each for each in fit(small_config(tmp_path, stop_ids=[123456])) if each.name == "stop ids")
        assert (found.state, found.text) == ("fails", "[123456] are not tokens")
