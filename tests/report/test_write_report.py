"""What is on the page: numbers as their definitions say, texts escaped, and what a run lacks is
said."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from recorded_runs import PAYLOADS, about, made_rows, thinking_rows, write_metrics, write_result, write_rows

from torchrl_llm import functional as F
from torchrl_llm import keys
from torchrl_llm.report import write_report
from torchrl_llm.report.curves import draw_curves
from torchrl_llm.report.episodes import QUANTITIES, quantized, token_values, turn_lanes
from torchrl_llm.report.page import by_importance, spread
from torchrl_llm.report.summary import headline
from torchrl_llm.runs.recorded_groups import spans
from torchrl_llm.runs.recording import read_recording
from torchrl_llm.runs.run_files import RunFiles
from torchrl_llm.utils.terminal import visible


def index_of(text: str) -> dict:
    """What the page's script reads."""
    return json.loads(block_of(text, "index"))


def block_of(text: str, name: str) -> bytes:
    found = re.search(rf'<script type="text/plain" id="{name}">(.*?)</script>', text)
    return zlib.decompress(base64.b64decode(found[1]))


@pytest.fixture
def recorded(tmp_path):
    """Rows, and the recording of them."""
    rows = made_rows(6, 3, 24, groups=2)
    rows[keys.TURN_TRUNCATED][0, -1], rows[keys.TURN_TERMINATED][0, -1] = True, False
    return rows, read_recording(write_rows(tmp_path, rows))


def test_extras_of_environments_are_on_the_page(tmp_path):
    rows = made_rows(2, 3, 24)
    rows[keys.turn_extra("regret")] = torch.tensor([[0.25, math.nan, 0.0], [math.nan] * 3])
    rows[keys.turn_extra("state")] = torch.tensor([[7, 2**40, 0], [7, 0, 0]])
    rows[keys.turn_extra("note")] = torch.zeros(2, 3, dtype=torch.int64)
    write_rows(tmp_path, rows, texts={7: PAYLOADS[2]})
    index = index_of(write_report(tmp_path).read_text())
    one, two = (episode for group in index["groups"] for episode in group["episodes"])
    assert one["extras"] == {"regret": [0.25, None, 0.0]}
    assert two["extras"] == {}
    texts = [None if piece is None else index["pieces"][piece] for piece in one["texts"]["state"]]
    assert texts == [visible(PAYLOADS[2]), "#10000000000", None]
    assert two["texts"] == {"state": [one["texts"]["state"][0], None, None]}


class TestNumbers:
    def test_of_tokens(self, recorded):
        rows, recording = recorded
        values, missing = token_values(recording)
        assert list(missing) == []
        assert set(values) == set(QUANTITIES)
        old, ref = rows[keys.SAMPLE_LOG_PROB], rows[keys.REF_LOG_PROB]
        expected = {
            "credit": rows[keys.ADVANTAGE] * rows[keys.LOSS_WEIGHT],
            "ratio": rows[keys.LOG_PROB] - old,
            "log_prob": old,
            "kl": F.kl_estimate(old, ref, "k3"),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value.numpy(), atol=1e-6, err_msg=name)

    def test_the_old_policy_is_the_scored_one_where_there_is_one(self, tmp_path):
        rows = made_rows()
        rows[keys.OLD_LOG_PROB] = rows[keys.SAMPLE_LOG_PROB] - 0.25
        values, _ = token_values(read_recording(write_rows(tmp_path, rows)))
        gap = rows[keys.LOG_PROB] - rows[keys.OLD_LOG_PROB]
        np.testing.assert_allclose(values["ratio"], gap.numpy(), atol=1e-6)

    def test_of_turns(self, recorded):
        rows, recording = recorded
        returns = F.turn_returns(rows[keys.TURN_REWARD], rows[keys.TURN_MASK], 0.9)
        ends = rows[keys.TURN_TERMINATED].any(-1)
        after = torch.where(ends, 0.0, rows[keys.BOOTSTRAP_VALUE])
        values = torch.cat([rows[keys.TURN_VALUE], after.unsqueeze(-1)], -1)
        errors = rows[keys.TURN_REWARD] + 0.9 * values[:, 1:] - values[:, :-1]
        assert not ends[0]
        for row in range(6):
            lanes = turn_lanes(recording, row)
            expected = {"return": returns, "error": errors, "advantage": rows[keys.TURN_ADVANTAGE]}
            for name, value in expected.items():
                np.testing.assert_allclose(lanes[name], value[row].numpy(), rtol=1e-3, atol=1e-6, err_msg=name)

    def test_who_wrote_what(self, tmp_path):
        rows = made_rows(1, 2, 12)
        rows[keys.ATTENTION_MASK][0, 6], rows[keys.TURN_IDS][0, 6] = False, -1
        assert spans(read_recording(write_rows(tmp_path, rows)), 0) == [[-1, 3], [0, 3], [-2, 1], [-1, 2], [1, 3]]

    def test_what_was_there_before_a_cut_is_told_from_what_is_new(self, tmp_path):
        rows, pieces = thinking_rows()
        recording = read_recording(write_rows(tmp_path, rows, pieces=pieces))
        for row, tokens in enumerate(rows[keys.TOKENS].tolist()):
            found, start = [], 0
            for turn, length in spans(recording, row):
                ids, start = tokens[start : start + length], start + length
                found.append((turn, "".join(pieces[each] for each in ids)))
            user, answered = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
            before = f"{user}Speak.{answered}"
            expected = [(-1, before)]
            for turn in range(3):
                said = f"<think>\nturn {turn}\n</think>\n\n{turn}"
                expected.append((turn, f"{said}<|im_end|>"))
                feedback = f"\n{user}Message {turn + 1}.{answered}"
                before = f"{before}{turn}<|im_end|>"
                if turn < 2:
                    expected += [(-2, pieces[0]), (-3, before), (-1, feedback)]
                    before += feedback
            assert found[: len(expected)] == expected

    @given(arrays(np.float64, st.integers(1, 50), elements=st.floats(-1e6, 1e6)), st.booleans())
    def test_bytes_are_near_the_numbers(self, values, signed):
        data, (low, high, _) = quantized(values, signed=signed)
        assert data.min() >= 1
        back = low + (high - low) * (data.astype(np.float64) - 1) / 254
        # Half a step, and the four digits of the ends.
        assert np.abs(back - values).max() <= (high - low) / 508 + 2e-3 * np.abs(values).max() + 1e-12
        if signed and (values == 0).any():
            assert set(data[values == 0].tolist()) == {128} or low == high == 0


class TestSelection:
    @given(st.integers(0, 300))
    def test_every_beginning_is_spread(self, count):
        order = list(spread(count))
        assert sorted(order) == list(range(count))
        for size in range(2, count):
            gaps = np.diff(sorted(order[:size]))
            assert gaps.max() <= 4 * count / size

    def test_a_task_over_the_whole_run_comes_before_a_second_task(self):
        groups = [[(number, task) for task in range(3)] for number in range(4)]
        assert [each[1] for each in by_importance(groups)] == [0] * 4 + [1] * 4 + [2] * 4


class TestPage:
    def test_it_holds_everything_and_fetches_nothing(self, tmp_path):
        write_rows(tmp_path, made_rows(4, 2, 12, groups=2))
        write_metrics(tmp_path, **{"evaluation/success": 0.5, "time/update_s": 3.0})
        write_result(tmp_path, success_ci95=[0.7, 0.9], wall_s=90.0, cpu_s=80.0, peak_rss_mb=700)
        (tmp_path / "evaluation_before.json").write_text(json.dumps({"success": 0.2, "episodes": 512, "turns": 3.0}))
        text = write_report(tmp_path).read_text()
        assert not re.search(r'(?:src|href)="(?!#)', text)
        assert "url(" not in re.sub(r"url\(#[^)]*\)", "", text)
        for part in (
            "0.800",
            "[0.700, 0.900]",
            "0.200",
            "512 episodes with seeds of their own",
            "90 s",
            "700 MB",
            "max_steps=40 turns played",
        ):
            assert part in text, part
        index = index_of(text)
        assert [len(group["episodes"]) for group in index["groups"]] == [2, 2]
        group = index["groups"][0]
        data = block_of(text, "block-0")
        assert len(data) == 2 * group["tokens"] + len(group["scales"]) * group["actions"]
        tokens = np.frombuffer(data[: 2 * group["tokens"]], "<u2")
        rows = made_rows(4, 2, 12, groups=2)
        assert [index["pieces"][token] for token in tokens[:12]] == [
            f" word{token}" for token in rows[keys.TOKENS][0].tolist()
        ]

    def test_episodes_gained_and_turns_penalized_are_on_it(self, tmp_path):
        """As far as the version that wrote the files counted them."""
        (tmp_path / "evaluation_before.json").write_text(json.dumps({"success": 0.2, "penalized": 0.25}))
        write_metrics(tmp_path, **{"rollout/penalized": 0.1})
        write_result(tmp_path)
        text = write_report(tmp_path).read_text()
        assert re.search(r"penalized turns</th><td>25\.0% <.*><td>- <", text)
        assert "Penalized turns" in text
        assert "McNemar" not in text
        paired = {"episodes": 9, "gained": 2, "lost": 9, "p_value": 0.0654296875}
        write_result(tmp_path, penalized_after=0.031, paired=paired)
        text = write_report(tmp_path).read_text()
        assert re.search(r"penalized turns</th><td>25\.0% <.*><td>3\.1% <", text)
        assert "of 9 episodes 2 gained, 9 lost (McNemar p = 0.07)." in text

    @pytest.mark.parametrize(
        ("metrics", "sampled"),
        [({"data/continued_turns": 1000.0}, "1,040"), ({"data/replayed_turns": 7.0}, "33"), ({}, None)],
    )
    def test_turns_of_continuations_are_counted(self, tmp_path, metrics, sampled):
        """Forty turns are in rows: others were played beside them, or some of them were sampled
        once."""
        write_metrics(tmp_path, **metrics)
        write_result(tmp_path)
        shown = headline(RunFiles.of(tmp_path))
        assert (shown["turns"], shown.get("turns sampled")) == ("40", sampled)

    def test_long_ids_have_names_of_their_own(self, tmp_path):
        """A browser takes numbers for doubles, to which the ids of continuations that lie close are
        one."""
        rows = made_rows(2, 3, 24)
        rows[keys.EPISODE_ID] = 2**61 + torch.tensor([5, 6])
        write_rows(tmp_path, rows)
        index = index_of(write_report(tmp_path).read_text())
        assert [episode["name"] for group in index["groups"] for episode in group["episodes"]] == [5, 6]

    def test_where_episodes_were_continued(self, tmp_path):
        rows = made_rows(3, 3, 24)
        rows[keys.EPISODE_ID] = torch.tensor([7, 2**61 + 5, 8])
        root, apart_from = torch.tensor([7, 7, 8]), torch.tensor([1, 1, -1])
        rows[keys.TURN_UNIT] = F.tree_units(rows[keys.EPISODE_ID], root, apart_from, 3)
        write_rows(tmp_path, rows)
        index = index_of(write_report(tmp_path).read_text())
        told = {episode["name"]: episode["tree"] for group in index["groups"] for episode in group["episodes"]}
        assert told == {7: "continued by others before turn 2", 5: "continued from episode 7 before turn 2", 8: ""}

    def test_characters_of_several_tokens_are_whole(self, tmp_path):
        rows = made_rows(1, 1, 4)
        rows[keys.TOKENS] = torch.tensor([[1, 2, 3, 1]])
        pieces = {1: "a", 2: "\udcc3", 3: "\udca9"}
        write_rows(tmp_path, rows, pieces=pieces)
        text = write_report(tmp_path).read_text()
        tokens = np.frombuffer(block_of(text, "block-0")[:8], "<u2")
        assert [index_of(text)["pieces"][token] for token in tokens] == ["a", "", "é", "a"]

    def test_warnings_that_fired_are_on_it(self, tmp_path):
        write_metrics(tmp_path, **{"policy/kl_old": 0.2})
        text = write_report(tmp_path).read_text()
        assert "iteration 1</b> the update moved the policy by 0.2 nats a token" in text
        assert "No warning fired" not in text

    def test_curves_end_with_the_evaluation_after(self, tmp_path):
        write_metrics(tmp_path)
        assert ">evaluation<" not in write_report(tmp_path).read_text()
        write_result(tmp_path, success_ci95=[0.7, 0.9])
        assert ">evaluation<" in write_report(tmp_path).read_text()

    def test_curves_begin_before_training_and_have_the_interval(self):
        history = [{"rollout/steps": 10.0 * i, "rollout/success": 0.5} for i in range(1, 4)]
        history[2] |= {"evaluation/success": 0.8, "evaluation/success_low": 0.7, "evaluation/success_high": 0.9}
        before = {"evaluation/success": 0.2, "evaluation/success_low": 0.1, "evaluation/success_high": 0.3}
        drawn = dict(draw_curves(history, before))
        assert list(drawn) == ["Win rate"]
        without = dict(draw_curves(history, {}))
        assert len(drawn["Win rate"]) > len(without["Win rate"])
        # Colors are the page's, which differ between light and dark.
        assert not re.search(r"#(?!m|p|D|000000)[0-9a-f]{6}\b", drawn["Win rate"])
        assert drawn == dict(draw_curves(history, before))


class TestUntrusted:
    def test_no_text_of_a_run_is_markup(self, tmp_path):
        """Texts of tokens are in compressed blocks; all else goes through the template's escape."""
        payload = PAYLOADS[0]
        pieces = about()["pieces"] | dict(enumerate(PAYLOADS))
        rows = made_rows()
        rows[keys.TOKENS][:, : len(PAYLOADS)] = torch.arange(len(PAYLOADS))
        write_rows(tmp_path, rows, env_names=[payload], pieces=pieces, missing={"entropy": payload})
        write_metrics(tmp_path)
        write_result(tmp_path, stop_reason=payload, env_name=payload, algo=payload)
        info = {
            "title": payload,
            "model": payload,
            "seed": payload,
            "started": payload,
            "changed": {payload: [payload, payload]},
        }
        info |= {"machine": {payload: payload}, "environment": {"versions": {payload: payload}}}
        (tmp_path / "run.json").write_text(json.dumps(info))
        text = write_report(tmp_path).read_text()
        # the index, a group, the page's own
        assert text.count("<script") == text.count("</script>") == 3
        assert "document.title='run'" not in text
        assert "&lt;script&gt;" in text
        assert set(index_of(text)["pieces"]) >= {visible(each) for each in PAYLOADS}

    def test_what_cannot_be_seen_is_named(self):
        assert visible(PAYLOADS[2]) == "⟨202E⟩gnp.exe⟨2066⟩"
        assert visible("tab\tand\nnew line, é, 漢, \u200d") == "tab\tand\nnew line, é, 漢, \u200d"

    @given(st.text())
    def test_nothing_is_left_that_turns_text_around(self, text):
        assert not set(visible(text)) & set(
            "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\x00\x1b"
        )


class TestMissingPieces:
    def test_a_run_that_diverged_still_has_a_page(self, tmp_path):
        rows = made_rows()
        rows[keys.TURN_VALUE][0, 0], rows[keys.TURN_ADVANTAGE][0, 0] = torch.nan, torch.inf
        rows[keys.ADVANTAGE][0] = torch.nan
        write_rows(tmp_path, rows)
        # Not json's own NaN, which JavaScript does not read.
        lanes = json.loads(
            block_of(write_report(tmp_path).read_text(), "index"), parse_constant=lambda name: pytest.fail(name)
        )["groups"][0]["episodes"][0]["lanes"]
        assert lanes["value"][0] is None
        assert lanes["advantage"][0] is None
        assert lanes["value"][1] is not None

    @pytest.mark.parametrize("name", ["none", "file"])
    def test_no_folder(self, tmp_path, name):
        (tmp_path / "file").write_text("")
        with pytest.raises(FileNotFoundError, match="is not a folder; expected the output_dir of a run"):
            write_report(tmp_path / name)

    def test_no_run(self, tmp_path):
        (tmp_path / "other.txt").write_text("")
        with pytest.raises(FileNotFoundError, match="holds nothing of a run"):
            write_report(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]

    def test_a_run_that_still_runs_has_no_result(self, tmp_path):
        write_metrics(tmp_path, 1)
        text = write_report(tmp_path).read_text()
        assert "it still runs, or was killed" in text
        assert text.count("not evaluated") == 6
        assert "the run has no run.json" in text

    def test_a_resumed_run_has_not_ended_as_before(self, tmp_path):
        write_metrics(tmp_path, 4)
        write_result(tmp_path, stop_reason="interrupted by SIGINT", iterations=2)
        text = write_report(tmp_path).read_text()
        assert "interrupted by SIGINT" not in text
        assert "it still runs, or was killed" in text

    def test_a_run_without_an_iteration(self, tmp_path):
        write_result(tmp_path, stop_reason="interrupted by SIGINT")
        text = write_report(tmp_path).read_text()
        assert "no iteration has ended yet" in text
        assert index_of(text)["groups"] == []

    def test_damaged_files_are_named_and_the_others_shown(self, tmp_path):
        write_rows(tmp_path, made_rows())
        broken = write_rows(tmp_path, made_rows(), "iteration-000000000002", iteration=2)
        broken.write_bytes(broken.read_bytes()[:100])
        (tmp_path / "result.json").write_text("{")
        text = write_report(tmp_path).read_text()
        assert "iteration-000000000002.safetensors is not a recording, or is damaged" in text
        assert "result.json could not be read" in text
        assert len(index_of(text)["groups"]) == 1

    def test_without_matplotlib_it_says_so(self, tmp_path, monkeypatch):
        write_metrics(tmp_path)
        for module in ("torchrl_llm.report.curves", "torchrl_llm.report.page"):
            monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
        text = write_report(tmp_path).read_text()
        assert "matplotlib is not installed" in text
        assert "<svg" not in text

    def test_what_a_run_did_not_compute_is_said(self, tmp_path):
        """LLMREINFORCE without a reference, and the evaluation after it."""
        rows = made_rows()
        for name in (keys.REF_LOG_PROB, keys.TURN_VALUE, keys.BOOTSTRAP_VALUE):
            del rows[name]
        write_rows(tmp_path, rows, missing={"entropy": "the model's scorer does not compute it"})
        write_rows(tmp_path, rows.exclude(keys.ADVANTAGE, keys.LOSS_WEIGHT), "after", kind="after")
        index = index_of(write_report(tmp_path).read_text())
        first, last = index["recordings"]
        assert first["missing"] == {"kl": "no reference was scored (the KL has no weight)"}
        assert last["missing"]["credit"] == "an evaluation is not learned from"
        assert set(index["groups"][0]["episodes"][0]["lanes"]) == {"reward", "return", "advantage"}
